import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from testbed.datasets import write_dataset
from tests.trainer.oracles import SHAPES
from tests.trainer.training_runs import (
    CHECKPOINTS,
    events_of,
    read_late,
    run_of,
    train_or_resume,
    weights_of,
)
from trainer import loop, preparation
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.stored_checkpoints import list_checkpoints
from trainer.config.train_config import CheckpointSettings, DataSettings, ModelSettings
from trainer.distributed.step import TrainStep
from trainer.errors import BadConfig
from trainer.health import time_budget
from trainer.record import start_clock
from trainer.record.run_record import Run, read_run
from trainer.record.start_clock import StartClock

pytestmark = pytest.mark.usefixtures("working_directory")

DROPOUT = ModelSettings(
    name="m",
    config=SHAPES["bert"]
    | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
)
"""A model whose weights depend on the random numbers of every step."""


def _learning_of(run: Run) -> list[tuple]:
    """Return the metrics of a run's rows that do not depend on time."""
    names = (
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "gradient_noise_scale_tokens",
        "skipped_steps",
    )
    return [tuple(getattr(row, name) for name in names) for row in run.steps]


def _check_same_as_plain(out: str, *, after_step: int = 0) -> None:
    """Assert that a run learned the same as the run "plain", to the last bit.

    The metrics of "plain" are compared from the step after ``after_step`` on.
    """
    learning = _learning_of(read_run(Path(out)))
    assert learning == _learning_of(read_run(Path("plain")))[after_step:]
    weights = weights_of(out)
    plain_weights = weights_of("plain")
    assert weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[name], plain_weights[name]) for name in weights)


def _varied_samples(count: int) -> list[list[int]]:
    """Return samples of 4 to 53 tokens, in which each token is one above the last."""
    return [
        [5 + (start + step) % 60 for step in range(4 + start % 50)]
        for start in range(count)
    ]


def test_libraries_take_workspaces_before_the_model_exists(monkeypatch):
    """Workspaces allocated within a step would split the memory of activations."""
    calls = Mock(
        warm_up_libraries=Mock(side_effect=preparation.warm_up_libraries),
        build_training=Mock(side_effect=preparation.build_training),
    )
    monkeypatch.setattr(preparation, "warm_up_libraries", calls.warm_up_libraries)
    monkeypatch.setattr(preparation, "build_training", calls.build_training)
    run_of(max_steps=1)
    names = [name for name, _, _ in calls.mock_calls]
    assert names == ["warm_up_libraries", "build_training"]


@pytest.mark.parametrize(
    "log_interval_steps",
    [pytest.param(3, id="in an interval"), pytest.param(100, id="in the first one")],
)
def test_last_steps_are_logged_when_the_data_ends(log_interval_steps):
    samples = _varied_samples(100)
    source = write_dataset(Path("d"), samples, vocab_size=128, validation=samples[:9])
    run = run_of(
        source=source,
        layout="padded",
        max_epochs=1,
        max_steps=1000,
        log_interval_steps=log_interval_steps,
    )
    # 100 padded sequences are 12 global batches of 8, and half of one.
    assert run.steps[-1].step == 13
    assert run.evaluations[-1].step == 13
    assert Path("r/model/config.json").is_file()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"data": DataSettings(num_workers=2)}, id="workers"),
        pytest.param(
            {"micro_batch_size": 3, "layout": "bucketed", "precision": "bf16"},
            id="bucketed",
        ),
        pytest.param(
            {"micro_batch_size": 4, "schedule": "cosine", "warmup_steps": 2},
            id="accumulated",
        ),
    ],
)
def test_interrupted_run_ends_with_the_same_weights(changes):
    settings = {"max_steps": 7, "model": DROPOUT, **changes}
    run_of("plain", **settings)
    # The next step still takes place, as it sums the requests of all ranks.
    for signal_after, steps in ((2, 3), (4, 5)):
        _, ending = train_or_resume(signal_after=signal_after, **settings)
        checkpoint = f"step-{steps:09d}"
        assert ending.exit_code == 75
        assert ending.steps == steps
        assert ending.checkpoint == checkpoint
        assert (
            ending.reason
            == "SIGTERM on rank 0; run the same command again to resume from"
            f" {checkpoint}"
        )
    run, ending = train_or_resume(**settings)
    assert (ending.exit_code, ending.steps) == (0, 7)
    _check_same_as_plain("r")
    assert run.header.attempt == 3
    assert run.header.resumed_from == "step-000000005"
    assert run.header.resumed_step == 5
    assert len(events_of(run, "stopped")) == len(events_of(run, "resumed")) == 2


def test_run_from_a_checkpoint_of_another_learns_the_same():
    settings = {"max_steps": 7, "model": DROPOUT}
    run_of("plain", **settings)
    train_or_resume(signal_after=4, **settings)
    origin = str((CHECKPOINTS / "step-000000005").absolute())
    fork = run_of("fork", resume=origin, **settings)
    assert fork.header.resumed_from == origin
    _check_same_as_plain("fork", after_step=5)


def test_reports_weights_cast_in_every_micro_batch(monkeypatch):
    monkeypatch.setattr(
        "trainer.model.masked_lm.verify_working_copies", lambda _: "for a reason"
    )
    (event,) = events_of(run_of(precision="bf16", max_steps=1), "preflight")
    assert (
        event.message
        == "weights of 'bert' are cast to bf16 in every micro-batch: for a reason"
    )


def test_longer_run_resumes_to_the_same_weights():
    settings = {"schedule": "constant", "warmup_steps": 2, "model": DROPOUT}
    run_of(max_steps=4, **settings)
    for name in ("r", "plain"):
        run_of(name, max_steps=7, **settings)
    _check_same_as_plain("r")


def test_interrupted_run_sees_every_sample_once():
    samples = _varied_samples(300)
    settings = {
        "source": write_dataset(Path("d"), samples, vocab_size=128),
        "max_epochs": 1,
        "max_steps": 500,
    }
    plain = run_of("plain", **settings)
    train_or_resume(signal_after=6, **settings)
    train_or_resume(**settings)
    # The run has finished: another start must not begin the epoch again.
    run, ending = train_or_resume(**settings)
    special_tokens = 2  # of each sample: one before it, and one after it
    expected_tokens = sum(len(sample) + special_tokens for sample in samples)
    assert sum(row.non_padding_tokens for row in run.steps) == expected_tokens
    assert (ending.exit_code, ending.steps) == (0, len(plain.steps))
    assert ending.steps < settings["max_steps"]  # the data ended before
    _check_same_as_plain("r")


class _SteppedTime:
    """Replaces the module ``time``: its clocks advance only with optimizer steps."""

    def __init__(self, monkeypatch, *, step_s: float) -> None:
        self._now_s = 1e9  # any time after 1970
        run = TrainStep.run

        def run_and_advance(*arguments, **options):
            self._now_s += step_s
            return run(*arguments, **options)

        monkeypatch.setattr(TrainStep, "run", run_and_advance)
        for module in (loop, time_budget, start_clock):
            monkeypatch.setattr(module, "time", self)

    def time(self) -> float:
        return self._now_s

    def monotonic(self) -> float:
        return self._now_s


def test_run_stops_before_its_time_limit(monkeypatch):
    settings = {"model": DROPOUT, "max_steps": 10_000}
    stepped_time = _SteppedTime(monkeypatch, step_s=0.1)
    # The process began 20 s ago, so that 4 s are left.
    clock = StartClock(stepped_time.time() - 20)
    _, ending = train_or_resume(clock=clock, stop_after_s=24.0, **settings)
    assert ending.exit_code == 75
    assert "train.stop_after_s" in ending.reason
    assert 20 < clock.total_s() < 24
    # It saved the step at which it stopped, and a restart continues from there: for one
    # step until the signal, and one in which the ranks agree to exit.
    assert ending.checkpoint == f"step-{ending.steps:09d}"
    run, later_ending = train_or_resume(signal_after=ending.steps + 1, **settings)
    assert run.header.resumed_step == ending.steps
    assert later_ending.steps == ending.steps + 2


def test_startup_time_is_the_sum_of_its_phases():
    run = run_of(max_steps=1)
    assert run.startup is not None
    phases_s = run.startup.model_dump(exclude={"total_s"})
    assert run.startup.total_s == pytest.approx(sum(phases_s.values()))


@pytest.fixture
def full_disk(monkeypatch):
    """Let every save fail as on a full disk."""
    monkeypatch.setattr(
        CheckpointWriter,
        "write",
        Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
    )


@pytest.mark.usefixtures("full_disk")
def test_training_continues_when_saves_fail():
    run, ending = train_or_resume(
        max_steps=4, checkpoint=CheckpointSettings(interval_steps=2)
    )
    assert (ending.exit_code, ending.checkpoint, len(run.steps)) == (0, None, 4)
    assert {(event.kind, event.step) for event in run.events} == {
        ("save_failed", step) for step in (0, 2, 4)
    }
    assert Path("r/model/model.safetensors").is_file()


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("enabled", [True, False])
def test_exit_without_a_checkpoint_is_reported(enabled):
    run, ending = train_or_resume(
        signal_after=2,
        max_steps=5,
        checkpoint=CheckpointSettings(enabled=enabled, interval_steps=1),
    )
    assert (ending.exit_code, ending.checkpoint) == (75, None)
    (stopped,) = events_of(run, "stopped")
    assert "step 3 is not saved" in stopped.message
    assert bool(events_of(run, "save_failed")) == enabled
    assert list_checkpoints(CHECKPOINTS) == []


def test_saves_by_time_while_training_continues():
    # A save is always due, but begins only after the one before it is written.
    run = run_of(
        max_steps=12, checkpoint=CheckpointSettings(interval_s=1e-6, keep_last=20)
    )
    saved = events_of(run, "saved")
    # At least before the first and after the last step, at most after each.
    assert 2 <= len(saved) <= 12 + 1
    assert len(list_checkpoints(CHECKPOINTS)) == len(saved)


def test_rejects_another_dataset_on_resume():
    run_of(max_steps=1)
    other = write_dataset(Path("other"), [[5, 6, 7]] * 50, vocab_size=128)
    with pytest.raises(BadConfig, match="does not match checkpoint"):
        run_of(source=other, max_steps=2)


def test_reading_metrics_late_changes_no_weights(monkeypatch):
    run_of("plain", max_steps=7, model=DROPOUT)
    read_late(monkeypatch)
    _, ending = train_or_resume("late", max_steps=7, model=DROPOUT, signal_after=1)
    assert (ending.exit_code, ending.steps) == (75, 4)  # two steps later than otherwise
    run_of("late", max_steps=7, model=DROPOUT)
    _check_same_as_plain("late")
