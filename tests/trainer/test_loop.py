import errno
import math
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import release_run, resolved_of
from tests.trainer.oracles import SHAPES, config_of
from trainer import loop, preparation
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.format import (
    CHECKPOINTS_DIRECTORY,
    list_checkpoints,
    read_checkpoint,
)
from trainer.checkpoint.resume import choose_run
from trainer.config.train_config import (
    CheckpointSettings,
    DataSettings,
    HealthSettings,
    ModelSettings,
)
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import micro_batch_plans
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.ranks import join_ranks
from trainer.distributed.step import TrainStep
from trainer.errors import BadConfig, TrainingFailed
from trainer.health import controller as controller_module
from trainer.health import time_budget
from trainer.health.events import EventRow
from trainer.health.watchdog import Watchdog
from trainer.loop import train
from trainer.model.masked_lm import MaskedLM
from trainer.record import run_record
from trainer.record.run_record import Run, RunExit, StartClock, read_run

DROPOUT = ModelSettings(
    name="m",
    config=SHAPES["bert"]
    | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
)
CHECKPOINTS = Path("r") / CHECKPOINTS_DIRECTORY


def read_late(monkeypatch):
    """Let numbers be read as late on a CPU as on a GPU."""
    steps_behind = controller_module._STEPS_BEHIND
    monkeypatch.setitem(steps_behind, "cpu", steps_behind["cuda"])


class _SignalledAfter(Watchdog):
    """Watchdog that receives SIGTERM after so many steps."""

    def __init__(self, steps: float) -> None:
        super().__init__(timeout_s=math.inf)
        self._signal_after = steps

    @property
    def first_signal(self):
        return signal.SIGTERM.value if self.step >= self._signal_after else None


@pytest.fixture(autouse=True)
def working_directory(patterned_dataset, tmp_path, monkeypatch):
    """Run each test in its own directory, with a dataset "data"."""
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(patterned_dataset)


def _train(
    out="r",
    *,
    source="data",
    signal_after=math.inf,
    resume="auto",
    clock=None,
    **changes,
) -> tuple[Run, RunExit]:
    """Train a run, or the rest of it, as a separate process would."""
    config = config_of(**changes)
    resolved = resolved_of(config, Path(source))
    writer, start = choose_run(Path(out), resume, resolved, {})
    try:
        ending = train(
            resolved,
            join_ranks(config, environment={}),
            writer,
            lambda row: None,
            start=start,
            watchdog=_SignalledAfter(signal_after),
            clock=clock,
        )
    finally:
        release_run(writer)
    return read_run(Path(out)), ending


def _run(out="r", **changes) -> Run:
    run, _ = _train(out, **changes)
    return run


def _weights(out: str) -> dict[str, torch.Tensor]:
    return load_file(Path(out) / "model" / "model.safetensors")


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


def _check_same(out: str, other: str = "plain", *, after: int = 0) -> None:
    """Assert that two runs, from a step on, learned the same to the last bit."""
    learning = _learning_of(read_run(Path(out)))
    assert learning == _learning_of(read_run(Path(other)))[after:]
    weights = _weights(out)
    other_weights = _weights(other)
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def _events(run: Run, kind: str) -> list[EventRow]:
    return [event for event in run.events if event.kind == kind]


def _varied_samples(count: int) -> list[list[int]]:
    """Samples of various lengths, in which each token is one above the last."""
    return [
        [5 + (start + step) % 60 for step in range(4 + start % 50)]
        for start in range(count)
    ]


def test_libraries_take_workspaces_before_the_model_exists(monkeypatch):
    """Workspaces allocated within a step would split the memory of activations."""
    calls = []
    for name in ("open_libraries", "build_training"):
        real = getattr(preparation, name)

        def call_and_note(*arguments, name=name, real=real):
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(preparation, name, call_and_note)
    _run(max_steps=1)
    assert calls == ["open_libraries", "build_training"]


@pytest.mark.parametrize("interval", [3, 100])
def test_last_steps_are_logged_when_the_data_ends(interval):
    samples = [[5 + (start + step) % 60 for step in range(20)] for start in range(100)]
    source = write_dataset(Path("d"), samples, vocab_size=128, validation=samples[:9])
    run = _run(
        source=source,
        layout="padded",
        max_epochs=1,
        max_steps=1000,
        log_interval_steps=interval,
    )
    assert run.steps[-1].step == 13  # of 8 sequences, the last one half empty
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
    _run("plain", **settings)
    for signal_after, steps in ((2, 3), (4, 5)):
        _, ending = _train(signal_after=signal_after, **settings)
        checkpoint = f"step-{steps:09d}"
        assert ending.exit_code == 75
        assert ending.steps == steps
        assert ending.checkpoint == checkpoint
        assert (
            ending.reason
            == "SIGTERM on rank 0; run the same command again to resume from"
            f" {checkpoint}"
        )
    run, ending = _train(**settings)
    assert (ending.exit_code, ending.steps) == (0, 7)
    _check_same("r")
    assert run.header.attempt == 3
    assert run.header.resumed_from == "step-000000005"
    assert run.header.resumed_step == 5
    assert len(_events(run, "stopped")) == len(_events(run, "resumed")) == 2

    # Another run that starts from one of its checkpoints.
    origin = str((CHECKPOINTS / "step-000000005").absolute())
    assert _run("fork", resume=origin, **settings).header.resumed_from == origin
    _check_same("fork", after=5)


def test_reports_weights_cast_in_every_micro_batch(monkeypatch):
    monkeypatch.setattr(
        "trainer.model.masked_lm.verify_working_copies", lambda _: "for a reason"
    )
    (event,) = _events(_run(precision="bf16", max_steps=1), "preflight")
    assert (
        event.message
        == "weights of 'bert' are cast to bf16 in every micro-batch: for a reason"
    )


def test_longer_run_resumes_to_the_same_weights():
    settings = {"schedule": "constant", "warmup_steps": 2, "model": DROPOUT}
    _run(max_steps=4, **settings)
    for name in ("r", "plain"):
        _run(name, max_steps=7, **settings)
    _check_same("r")


def test_interrupted_run_sees_every_sample_once():
    samples = _varied_samples(300)
    settings = {
        "source": write_dataset(Path("d"), samples, vocab_size=128),
        "max_epochs": 1,
        "max_steps": 500,
    }
    plain = _run("plain", **settings)
    _train(signal_after=6, **settings)
    _train(**settings)
    run, ending = _train(**settings)  # must not begin the epoch again
    assert sum(row.non_padding_tokens for row in run.steps) == sum(
        len(sample) + 2 for sample in samples
    )
    assert (ending.exit_code, ending.steps) == (0, len(plain.steps))
    assert ending.steps < 500
    _check_same("r")


class _SteppedTime:
    """Stands for the module ``time``; its clocks advance only by optimizer steps."""

    def __init__(self, monkeypatch, *, step_s: float) -> None:
        self._now_s = 1e9
        run = TrainStep.run

        def run_and_advance(*arguments, **options):
            self._now_s += step_s
            return run(*arguments, **options)

        monkeypatch.setattr(TrainStep, "run", run_and_advance)
        for module in (loop, time_budget, run_record):
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
    _, ending = _train(clock=clock, stop_after_s=24.0, **settings)
    assert ending.exit_code == 75
    assert "train.stop_after_s" in ending.reason
    assert 20 < clock.total_s() < 24
    assert ending.checkpoint == f"step-{ending.steps:09d}"
    _, later = _train(signal_after=ending.steps + 1, **settings)
    assert later.steps == ending.steps + 2


def test_startup_time_is_the_sum_of_its_phases():
    run = _run(max_steps=1)
    assert run.startup is not None
    phases_s = run.startup.model_dump(exclude={"total_s"})
    assert run.startup.total_s == pytest.approx(sum(phases_s.values()))


@pytest.fixture
def full_disk(monkeypatch):
    monkeypatch.setattr(
        CheckpointWriter,
        "write",
        Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
    )


@pytest.mark.usefixtures("full_disk")
def test_training_continues_when_saves_fail():
    run, ending = _train(max_steps=4, checkpoint=CheckpointSettings(interval_steps=2))
    assert (ending.exit_code, ending.checkpoint, len(run.steps)) == (0, None, 4)
    assert {(event.kind, event.step) for event in run.events} == {
        ("save_failed", step) for step in (0, 2, 4)
    }
    assert Path("r/model/model.safetensors").is_file()


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("enabled", [True, False])
def test_exit_without_a_checkpoint_is_reported(enabled):
    run, ending = _train(
        signal_after=2,
        max_steps=5,
        checkpoint=CheckpointSettings(enabled=enabled, interval_steps=1),
    )
    assert (ending.exit_code, ending.checkpoint) == (75, None)
    (stopped,) = _events(run, "stopped")
    assert "step 3 is not saved" in stopped.message
    assert bool(_events(run, "save_failed")) == enabled
    assert list_checkpoints(CHECKPOINTS) == []


def test_saves_by_time_while_training_continues():
    run = _run(
        max_steps=12, checkpoint=CheckpointSettings(interval_s=1e-6, keep_last=20)
    )
    saved = _events(run, "saved")
    assert 2 <= len(saved) <= 12
    assert len(list_checkpoints(CHECKPOINTS)) == len(saved)


def test_rejects_another_dataset_on_resume():
    _run(max_steps=1)
    other = write_dataset(Path("other"), [[5, 6, 7]] * 50, vocab_size=128)
    with pytest.raises(BadConfig, match="does not match checkpoint"):
        _run(source=other, max_steps=2)


class _BadSteps:
    """Multiplies the losses of some steps, counted over all that are tried, from 1."""

    def __init__(self, monkeypatch, steps, factor=100.0) -> None:
        self.tried = 0
        self.ends = []
        """Position after each step that was tried."""
        self.learning_rates = []
        run = TrainStep.run
        forward = MaskedLM.forward

        def run_and_note(step, batches, lr, **options):
            self.tried += 1
            self.ends.append(batches[-1].after)
            self.learning_rates.append(lr)
            return run(step, batches, lr, **options)

        def forward_with_factor(module, batch):
            loss = forward(module, batch)
            return loss * (factor if self.tried in steps else 1.0)

        monkeypatch.setattr(TrainStep, "run", run_and_note)
        monkeypatch.setattr(MaskedLM, "forward", forward_with_factor)


def _health(**changes) -> HealthSettings:
    return HealthSettings(window_steps=16, easing_steps=10, **changes)


ROLLING_BACK = {
    "health": _health(on_spike="rollback"),
    "checkpoint": CheckpointSettings(interval_steps=18, keep_last=9),
}


ROLLBACK_SETTINGS = {"max_steps": 22, "warmup_steps": 0, **ROLLING_BACK}


def test_rolls_back_after_a_spike(monkeypatch):
    _BadSteps(monkeypatch, {20})
    run, ending = _train(**ROLLBACK_SETTINGS)
    assert (ending.exit_code, ending.steps) == (0, 22)
    assert [row.step for row in run.steps] == list(range(1, 23))
    (spike,) = _events(run, "spike")
    assert (spike.step, spike.action, spike.level) == (20, "rollback", "error")
    (rolled_back,) = _events(run, "rolled_back")
    assert rolled_back.values == {
        "from_step": 20,
        "to_step": 18,
        "first_row_left_out": 144,
        "first_row_after": 160,
        "rollbacks": 1,
        "learning_rate_share": 0.5,
    }


def test_rollback_skips_the_data_since_the_checkpoint(monkeypatch):
    bad_steps = _BadSteps(monkeypatch, {20})
    _run(**ROLLBACK_SETTINGS)
    assert bad_steps.tried == 24
    assert [position.rows for position in bad_steps.ends] == [
        8 * number for number in range(1, 25)
    ]


def test_rollback_eases_the_learning_rate(monkeypatch):
    bad_steps = _BadSteps(monkeypatch, {20})
    _run(**ROLLBACK_SETTINGS)
    config = config_of(**ROLLBACK_SETTINGS)
    before, after, next_one = bad_steps.learning_rates[19:22]
    assert before == learning_rate(config, 19)
    assert after == pytest.approx(0.5 * learning_rate(config, 18))
    assert next_one == pytest.approx(0.55 * learning_rate(config, 19))


def test_rollback_saves_the_restored_state(monkeypatch):
    _BadSteps(monkeypatch, {20})
    _run(**ROLLBACK_SETTINGS)
    names = [path.name for path in list_checkpoints(CHECKPOINTS)]
    assert names[:2] == ["step-000000022-rollback-1", "step-000000018-rollback-1"]
    before = CHECKPOINTS / "step-000000018"
    after = CHECKPOINTS / "step-000000018-rollback-1"
    weights = "rank-00000.safetensors"
    assert (before / weights).read_bytes() == (after / weights).read_bytes()
    state_before = read_checkpoint(before).state
    state_after = read_checkpoint(after).state
    assert state_after.position.rows == state_before.position.rows + 16
    assert state_after.good


@pytest.mark.parametrize("max_rollbacks", [0, 2])
@pytest.mark.parametrize(
    "late", [False, True], ids=["at once", "in the last two steps"]
)
def test_gives_up_when_rolling_back_does_not_help(monkeypatch, max_rollbacks, late):
    if late:
        read_late(monkeypatch)
    bad_steps = _BadSteps(monkeypatch, set(range(7, 100)), factor=math.nan)
    settings = {
        "max_steps": 8 if late else 50,
        "health": _health(on_non_finite="rollback", max_rollbacks=max_rollbacks),
        "checkpoint": CheckpointSettings(interval_steps=6),
    }
    with pytest.raises(TrainingFailed, match="training gives up") as raised:
        _run(**settings)
    assert "train.learning_rate" in raised.value.next_step
    expected_tries = 7 + max_rollbacks
    if late:  # the run gets to its end each time before it knows
        expected_tries = 8 + 2 * max_rollbacks
    assert bad_steps.tried == expected_tries
    run = read_run(Path("r"))
    assert len(_events(run, "rolled_back")) == max_rollbacks
    assert _events(run, "non_finite")[-1].action == "give_up"
    assert not Path("r/model").exists()
    for path in list_checkpoints(CHECKPOINTS):
        tensors = load_file(path / "rank-00000.safetensors")
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_resumed_run_counts_skipped_steps(monkeypatch):
    settings = {
        "max_steps": 22,
        "health": _health(on_spike="skip"),
        "micro_batch_size": 4,
    }
    with monkeypatch.context() as patch:
        _BadSteps(patch, {5}, factor=math.nan)
        _train(signal_after=18, **settings)
    _BadSteps(monkeypatch, {1})
    run = _run(**settings)
    assert [run.steps[step].skipped_steps for step in (3, 18, -1)] == [0, 1, 2]
    # The checkpoint has the losses of earlier steps that this one is compared with.
    (spike,) = _events(run, "spike")
    assert (spike.step, spike.action) == (20, "skip")
    assert spike.samples == _samples_of_step(20, **settings)


def _samples_of_step(step: int, **changes) -> list[int]:
    """Return the samples of a step of two micro-batches, sorted."""
    dataset = TokenDataset.open(Path("data"))
    config = config_of(**changes)
    plan = make_plan(config, len(dataset), 1)
    plans = list(micro_batch_plans(dataset, config, plan, 0, steps=step))
    samples = []
    for micro_batch_plan in plans[-2:]:
        samples += micro_batch_plan.segments.samples.tolist()
    return sorted(samples)


def test_skips_non_finite_step_by_default(monkeypatch):
    _BadSteps(monkeypatch, {3}, factor=math.nan)
    run, ending = _train(max_steps=6)
    assert ending.exit_code == 0
    assert [row.step for row in run.steps if row.loss is None] == [3]
    assert len(run.steps) == 6
    assert run.steps[-1].skipped_steps == 1
    assert all(value.isfinite().all() for value in _weights("r").values())
    (event,) = _events(run, "non_finite")
    assert (event.values["loss"], event.action) == ("nan", "skip")


def test_checkpoint_after_non_finite_step_is_not_good(monkeypatch):
    _BadSteps(monkeypatch, {3}, factor=math.nan)
    _run(max_steps=6, checkpoint=CheckpointSettings(interval_steps=1, keep_last=9))
    good = {
        path.name: read_checkpoint(path).state.good
        for path in list_checkpoints(CHECKPOINTS)
    }
    assert good == {f"step-{step:09d}": step != 3 for step in range(7)}


@pytest.mark.parametrize(("step", "workers"), [(19, 0), (20, 1)])
def test_undoes_spike_in_the_last_two_steps(monkeypatch, step, workers):
    read_late(monkeypatch)
    bad_steps = _BadSteps(monkeypatch, {step})
    run, ending = _train(
        data=DataSettings(num_workers=workers), max_steps=20, **ROLLING_BACK
    )
    assert (ending.exit_code, ending.steps, ending.reason) == (0, 20, "finished")
    assert ending.checkpoint == "step-000000020-rollback-1"
    (rolled_back,) = _events(run, "rolled_back")
    assert rolled_back.values["from_step"] == 20
    assert rolled_back.values["to_step"] == 18
    assert bad_steps.tried == 22
    assert [row.step for row in run.steps] == list(range(1, 21))


def test_undoes_spike_found_on_exit(monkeypatch):
    read_late(monkeypatch)
    _BadSteps(monkeypatch, {21})
    run, ending = _train(signal_after=19, max_steps=30, **ROLLING_BACK)
    assert (ending.exit_code, ending.steps, ending.checkpoint) == (
        75,
        18,
        "step-000000018-rollback-1",
    )
    kinds = ["spike", "rolled_back", "stopped"]
    assert [event.kind for event in run.events if event.kind in kinds] == kinds


def test_reading_metrics_late_changes_no_weights(monkeypatch):
    _run("plain", max_steps=7, model=DROPOUT)
    read_late(monkeypatch)
    _, ending = _train("late", max_steps=7, model=DROPOUT, signal_after=1)
    assert (ending.exit_code, ending.steps) == (75, 4)  # two steps later than otherwise
    _run("late", max_steps=7, model=DROPOUT)
    _check_same("late")
