import errno
import math
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import leave, resolved_of
from tests.trainer.health.test_controller import read_late
from tests.trainer.oracles import SHAPES, config_of
from trainer import loop
from trainer.checkpoint.format import (
    CHECKPOINTS_DIRECTORY,
    CheckpointWriter,
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
from trainer.health.events import EventRow
from trainer.health.watchdog import Watchdog
from trainer.loop import train
from trainer.model.masked_lm import MaskedLM
from trainer.record.run_record import Run, RunExit, StartClock, read_run

_RATES = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
DROPOUT = ModelSettings(name="m", config=SHAPES["bert"] | _RATES)


class _Asked(Watchdog):
    """A watch to which a signal comes after so many steps."""

    def __init__(self, after: int) -> None:
        super().__init__(timeout_s=math.inf)
        self._after = after

    @property
    def first_signal(self):
        return signal.SIGTERM.value if self.step >= self._after else None


CHECKPOINTS = Path("r") / CHECKPOINTS_DIRECTORY


@pytest.fixture(autouse=True)
def here(patterned_dataset, tmp_path, monkeypatch):
    """Trainings of a dataset "data" in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(patterned_dataset)


def _train(
    out="r",
    *,
    source="data",
    asked_after=math.inf,
    resume="auto",
    clock=None,
    **changes,
) -> tuple[Run, RunExit]:
    """A run, or the rest of it, as a process of its own would train it."""
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
            watchdog=_Asked(asked_after),
            clock=clock,
        )
    finally:
        leave(writer)
    return read_run(Path(out)), ending


def _run(out="r", **changes) -> Run:
    return _train(out, **changes)[0]


def test_libraries_take_their_workspaces_before_there_is_a_model(monkeypatch):
    """Workspaces that are allocated within a step would split the memory of its
    activations."""
    order = []
    for name in ("open_libraries", "build_training"):
        real = getattr(loop, name)
        monkeypatch.setattr(
            loop,
            name,
            lambda *given, name=name, real=real: order.append(name) or real(*given),
        )
    _run(max_steps=1)
    assert order == ["open_libraries", "build_training"]


def _weights(out: str) -> dict[str, torch.Tensor]:
    return load_file(Path(out) / "model" / "model.safetensors")


def _learned(run: Run) -> list[tuple]:
    """What rows say of the learning, and nothing of time."""
    told = (
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "gradient_noise_scale_tokens",
        "skipped_steps",
    )
    return [tuple(getattr(row, name) for name in told) for row in run.steps]


def _check_same(one: str, other: str = "plain", *, after: int = 0) -> None:
    """Two runs, from a step on, have learned the same to the last bit."""
    assert _learned(read_run(Path(one))) == _learned(read_run(Path(other)))[after:]
    first, second = _weights(one), _weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def _events(run: Run, kind: str) -> list[EventRow]:
    return [event for event in run.events if event.kind == kind]


@pytest.mark.parametrize("interval", [3, 100])
def test_steps_after_the_last_logged_one_are_logged_when_the_data_ends(interval):
    samples = [[5 + (start + step) % 60 for step in range(20)] for start in range(100)]
    source = write_dataset(Path("d"), samples, vocab_size=128, validation=samples[:9])
    run = _run(
        source=source,
        layout="padded",
        max_epochs=1,
        max_steps=1000,
        log_interval_steps=interval,
    )
    assert run.steps[-1].step == 13  # of 8 rows, the last of them half empty
    assert run.evaluations[-1].step == 13
    assert Path("r/model/config.json").is_file()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": DROPOUT},
        {"model": DROPOUT, "data": DataSettings(num_workers=2)},
        {
            "model": DROPOUT,
            "micro_batch_size": 3,
            "layout": "bucketed",
            "precision": "bf16",
        },
        {
            "model": DROPOUT,
            "micro_batch_size": 4,
            "schedule": "cosine",
            "warmup_steps": 2,
        },
    ],
    ids=["plain", "workers", "bucketed", "accumulated"],
)
def test_a_run_that_is_interrupted_and_one_that_forks_off_end_with_the_same_weights_bit_by_bit(
    changes,
):
    changes = {"max_steps": 7, **changes}
    _run("plain", **changes)
    for asked_after, steps in ((2, 3), (4, 5)):
        _, ending = _train(asked_after=asked_after, **changes)
        assert (ending.exit_code, ending.steps, ending.checkpoint) == (
            75,
            steps,
            f"step-{steps:09d}",
        )
        assert (
            ending.reason
            == "SIGTERM on rank 0; run the same command again to resume from"
            f" {ending.checkpoint}"
        )
    run, ending = _train(**changes)
    assert (ending.exit_code, ending.steps) == (0, 7)
    _check_same("r")
    assert (run.header.attempt, run.header.resumed_from, run.header.resumed_step) == (
        3,
        "step-000000005",
        5,
    )
    assert len(_events(run, "stopped")) == len(_events(run, "resumed")) == 2
    origin = str((CHECKPOINTS / "step-000000005").absolute())
    assert _run("fork", resume=origin, **changes).header.resumed_from == origin
    _check_same("fork", after=5)


def test_weights_that_every_micro_batch_casts_are_told_with_the_reason(monkeypatch):
    monkeypatch.setattr(
        "trainer.model.masked_lm.verify_working_copies", lambda _: "for a reason"
    )
    (event,) = _events(_run(precision="bf16", max_steps=1), "preflight")
    assert (
        event.message
        == "weights of 'bert' are cast to bf16 in every micro-batch: for a reason"
    )


def test_a_run_goes_on_to_more_steps_as_if_it_had_been_asked_for_them_before():
    settings = {"schedule": "constant", "warmup_steps": 2, "model": DROPOUT}
    _run(max_steps=4, **settings)
    for name in ("r", "plain"):
        _run(name, max_steps=7, **settings)
    _check_same("r")


def test_an_interrupted_run_sees_every_sample_of_its_epochs_once_and_no_epoch_is_begun_again():
    samples = [
        [5 + (start + step) % 60 for step in range(4 + start % 50)]
        for start in range(300)
    ]
    settings = {
        "source": write_dataset(Path("d"), samples, vocab_size=128),
        "max_epochs": 1,
        "max_steps": 500,
    }
    plain = _run("plain", **settings)
    for asked_after in (6, math.inf, math.inf):
        run, ending = _train(asked_after=asked_after, **settings)
    assert sum(row.non_padding_tokens for row in run.steps) == sum(
        len(sample) + 2 for sample in samples
    )
    assert (ending.exit_code, ending.steps) == (0, len(plain.steps))
    assert ending.steps < 500
    _check_same("r")


def test_a_run_stops_in_time_saves_and_goes_on_when_it_is_started_again():
    settings = {"model": DROPOUT, "max_steps": 10_000}
    # The process began 20 s ago, so that 4 s are left.
    clock = StartClock(time.time() - 20)
    _, ending = _train(clock=clock, stop_after_s=24.0, **settings)
    assert ending.exit_code == 75
    assert "train.stop_after_s" in ending.reason
    assert 20 < clock.total_s() < 24
    assert ending.checkpoint == f"step-{ending.steps:09d}"
    run, later = _train(asked_after=ending.steps + 1, **settings)
    assert later.steps == ending.steps + 2
    assert run.startup is not None
    assert run.startup.total_s == pytest.approx(
        sum(run.startup.model_dump(exclude={"total_s"}).values())
    )


@pytest.fixture
def full_disk(monkeypatch):
    monkeypatch.setattr(
        CheckpointWriter,
        "write",
        Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
    )


@pytest.mark.usefixtures("full_disk")
def test_a_disk_that_takes_no_checkpoint_ends_no_training():
    run, ending = _train(max_steps=4, checkpoint=CheckpointSettings(interval_steps=2))
    assert (ending.exit_code, ending.checkpoint, len(run.steps)) == (0, None, 4)
    assert {(event.kind, event.step) for event in run.events} == {
        ("save_failed", step) for step in (0, 2, 4)
    }
    assert Path("r/model/model.safetensors").is_file()


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_that_leaves_without_a_checkpoint_says_so(enabled):
    run, ending = _train(
        asked_after=2,
        max_steps=5,
        checkpoint=CheckpointSettings(enabled=enabled, interval_steps=1),
    )
    assert (ending.exit_code, ending.checkpoint) == (75, None)
    (stopped,) = _events(run, "stopped")
    assert "step 3 is not saved" in stopped.message
    assert bool(_events(run, "save_failed")) == enabled
    assert list_checkpoints(CHECKPOINTS) == []


def test_saves_by_the_clock_happen_while_training_goes_on():
    saved = _events(
        _run(
            max_steps=12, checkpoint=CheckpointSettings(interval_s=1e-6, keep_last=20)
        ),
        "saved",
    )
    assert 2 <= len(saved) <= 12
    assert len(list_checkpoints(CHECKPOINTS)) == len(saved)


def test_another_dataset_than_the_checkpoints_is_refused():
    _run(max_steps=1)
    with pytest.raises(BadConfig, match="does not match checkpoint"):
        _run(
            source=write_dataset(Path("other"), [[5, 6, 7]] * 50, vocab_size=128),
            max_steps=2,
        )


class _Trouble:
    """Makes the losses of some forward passes too high, counted over the steps that
    were tried, from 1."""

    def __init__(self, monkeypatch, steps, factor=100.0) -> None:
        self.tried, self.ends, self.learning_rates = 0, [], []
        run, forward = TrainStep.run, MaskedLM.forward

        def counted(step, batches, lr, **options):
            self.tried += 1
            self.ends.append(batches[-1].after)
            self.learning_rates.append(lr)
            return run(step, batches, lr, **options)

        def raised(module, batch):
            return forward(module, batch) * (factor if self.tried in steps else 1.0)

        monkeypatch.setattr(TrainStep, "run", counted)
        monkeypatch.setattr(MaskedLM, "forward", raised)


def _health(**changes) -> HealthSettings:
    return HealthSettings(window_steps=16, easing_steps=10, **changes)


ROLLING_BACK = {
    "health": _health(on_spike="rollback"),
    "checkpoint": CheckpointSettings(interval_steps=18, keep_last=9),
}


def test_a_spike_is_undone_its_data_left_out_and_the_learning_rate_eased(monkeypatch):
    trouble = _Trouble(monkeypatch, {20})
    settings = {"max_steps": 22, "warmup_steps": 0, **ROLLING_BACK}
    run, ending = _train(**settings)
    assert (ending.exit_code, ending.steps) == (0, 22)
    (spike,) = _events(run, "spike")
    assert (spike.step, spike.action, spike.level) == (20, "rollback", "error")
    (told,) = _events(run, "rolled_back")
    expected = {
        "from_step": 20,
        "to_step": 18,
        "first_row_left_out": 144,
        "first_row_after": 160,
        "rollbacks": 1,
    }
    assert told.values == expected | {"learning_rate_share": 0.5}
    assert trouble.tried == 24
    assert [end.rows for end in trouble.ends] == [8 * number for number in range(1, 25)]
    config = config_of(**settings)
    assert trouble.learning_rates[19] == learning_rate(config, 19)
    assert trouble.learning_rates[20] == pytest.approx(0.5 * learning_rate(config, 18))
    assert trouble.learning_rates[21] == pytest.approx(0.55 * learning_rate(config, 19))
    assert [row.step for row in run.steps] == list(range(1, 23))
    names = [path.name for path in list_checkpoints(CHECKPOINTS)]
    assert names[:2] == ["step-000000022-rollback-1", "step-000000018-rollback-1"]
    before, after = (
        CHECKPOINTS / name for name in ("step-000000018", "step-000000018-rollback-1")
    )
    first, second = (
        (path / "rank-00000.safetensors").read_bytes() for path in (before, after)
    )
    assert first == second
    assert (
        read_checkpoint(after).state.position.rows
        == read_checkpoint(before).state.position.rows + 16
    )
    assert read_checkpoint(after).state.good


@pytest.mark.parametrize("max_rollbacks", [0, 2])
@pytest.mark.parametrize(
    "late", [False, True], ids=["at once", "in the last two steps"]
)
def test_training_gives_up_when_rolling_back_does_not_help(
    monkeypatch, max_rollbacks, late
):
    if late:
        read_late(monkeypatch)
    trouble = _Trouble(monkeypatch, set(range(7, 100)), factor=math.nan)
    settings = {
        "max_steps": 8 if late else 50,
        "health": _health(on_non_finite="rollback", max_rollbacks=max_rollbacks),
        "checkpoint": CheckpointSettings(interval_steps=6),
    }
    with pytest.raises(TrainingFailed, match="training gives up") as caught:
        _run(**settings)
    assert "train.learning_rate" in caught.value.next_step
    # Read late, it gets to the end each time before it knows.
    assert trouble.tried == (8 + 2 * max_rollbacks if late else 7 + max_rollbacks)
    run = read_run(Path("r"))
    assert len(_events(run, "rolled_back")) == max_rollbacks
    assert _events(run, "non_finite")[-1].action == "give_up"
    assert not Path("r/model").exists()
    for path in list_checkpoints(CHECKPOINTS):
        assert all(
            value.isfinite().all()
            for value in load_file(path / "rank-00000.safetensors").values()
        )


def test_a_skipped_step_is_counted_and_named_with_its_samples_by_a_run_that_went_on(
    monkeypatch,
):
    settings = {
        "max_steps": 22,
        "health": _health(on_spike="skip"),
        "micro_batch_size": 4,
    }
    with monkeypatch.context() as patch:
        _Trouble(patch, {5}, factor=math.nan)
        _train(asked_after=18, **settings)
    _Trouble(monkeypatch, {1})
    run = _run(**settings)
    assert [run.steps[step].skipped_steps for step in (3, 18, -1)] == [0, 1, 2]
    (spike,) = _events(run, "spike")  # what is usual was saved with the run
    assert (spike.step, spike.action) == (20, "skip")
    dataset, config = TokenDataset.open(Path("data")), config_of(**settings)
    plans = list(
        micro_batch_plans(
            dataset, config, make_plan(config, len(dataset), 1), 0, steps=20
        )
    )
    assert spike.samples == sorted(
        sample for plan in plans[38:40] for sample in plan.segments.samples.tolist()
    )


def test_a_step_that_is_not_finite_is_left_out_by_default_and_its_checkpoint_is_not_one_to_return_to(
    monkeypatch,
):
    _Trouble(monkeypatch, {3}, factor=math.nan)
    run, ending = _train(
        max_steps=6, checkpoint=CheckpointSettings(interval_steps=1, keep_last=9)
    )
    assert ending.exit_code == 0
    assert [row.loss is None for row in run.steps] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert run.steps[-1].skipped_steps == 1
    assert all(value.isfinite().all() for value in _weights("r").values())
    (event,) = _events(run, "non_finite")
    assert (event.values["loss"], event.action) == ("nan", "skip")
    good = {
        path.name: read_checkpoint(path).state.good
        for path in list_checkpoints(CHECKPOINTS)
    }
    assert good == {f"step-{step:09d}": step != 3 for step in range(7)}


@pytest.mark.parametrize(("step", "workers"), [(19, 0), (20, 1)])
def test_a_spike_in_the_last_two_steps_is_undone_before_the_run_ends(
    monkeypatch, step, workers
):
    read_late(monkeypatch)
    trouble = _Trouble(monkeypatch, {step})
    run, ending = _train(
        data=DataSettings(num_workers=workers), max_steps=20, **ROLLING_BACK
    )
    assert (ending.exit_code, ending.steps, ending.reason) == (0, 20, "finished")
    assert ending.checkpoint == "step-000000020-rollback-1"
    (told,) = _events(run, "rolled_back")
    assert (told.values["from_step"], told.values["to_step"]) == (20, 18)
    assert trouble.tried == 22
    assert [row.step for row in run.steps] == list(range(1, 21))


def test_a_spike_that_is_known_only_when_a_run_is_asked_to_leave_is_undone_and_saved_so(
    monkeypatch,
):
    read_late(monkeypatch)
    _Trouble(monkeypatch, {21})
    run, ending = _train(asked_after=19, max_steps=30, **ROLLING_BACK)
    assert (ending.exit_code, ending.steps, ending.checkpoint) == (
        75,
        18,
        "step-000000018-rollback-1",
    )
    kinds = ["spike", "rolled_back", "stopped"]
    assert [event.kind for event in run.events if event.kind in kinds] == kinds


def test_a_run_whose_numbers_are_read_late_learns_the_same(monkeypatch):
    _run("plain", max_steps=7, model=DROPOUT)
    read_late(monkeypatch)
    _, ending = _train("late", max_steps=7, model=DROPOUT, asked_after=1)
    assert (ending.exit_code, ending.steps) == (75, 4)  # two steps later than otherwise
    _run("late", max_steps=7, model=DROPOUT)
    _check_same("late")
