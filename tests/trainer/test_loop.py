"""Runs of the training loop: their start, their saves, and their end."""

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from testbed.datasets import write_dataset
from tests.trainer.training_runs import (
    CHECKPOINTS,
    events_of,
    run_of,
    train_or_resume,
    varied_samples,
)
from trainer import loop, preparation
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.stored_checkpoints import list_checkpoints
from trainer.distributed.step import TrainStep
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import CheckpointSettings
from trainer.health import time_budget
from trainer.health.watchdog import REQUEUE
from trainer.record import start_clock
from trainer.record.start_clock import StartClock

pytestmark = pytest.mark.usefixtures("working_directory")


def test_libraries_take_workspaces_before_the_model_exists(monkeypatch):
    """Workspaces allocated within a step would split the memory of activations."""
    calls = []
    warm_up_libraries = preparation.warm_up_libraries
    build_training = preparation.build_training

    def note_and_warm_up(*arguments):
        calls.append("warm up")
        return warm_up_libraries(*arguments)

    def note_and_build(*arguments):
        calls.append("build")
        return build_training(*arguments)

    monkeypatch.setattr(preparation, "warm_up_libraries", note_and_warm_up)
    monkeypatch.setattr(preparation, "build_training", note_and_build)
    run_of(max_steps=1)
    assert calls == ["warm up", "build"]


@pytest.mark.parametrize(
    "log_interval_steps",
    [
        pytest.param(3, id="in an interval"),
        pytest.param(100, id="in the first interval"),
    ],
)
def test_last_steps_are_logged_when_the_data_ends(log_interval_steps):
    samples = varied_samples(100)
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


def test_reports_weights_cast_in_every_micro_batch(monkeypatch):
    monkeypatch.setattr(
        "trainer.model.masked_lm.verify_working_copies", lambda _: "for a reason"
    )
    (event,) = events_of(run_of(precision="bf16", max_steps=1), "preflight")
    assert (
        event.message
        == "weights of 'bert' are cast to bf16 in every micro-batch: for a reason"
    )


class _SteppedTime:
    """Replacement of the module ``time``, whose clocks advance with optimizer steps."""

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
    stepped_time = _SteppedTime(monkeypatch, step_s=0.1)
    # The process began 20 s ago, so that 4 s are left.
    clock = StartClock(began_s=stepped_time.time() - 20)
    _, ending = train_or_resume(clock=clock, stop_after_s=24.0, max_steps=10_000)
    assert ending.exit_code == REQUEUE
    assert "train.stop_after_s" in ending.reason
    assert 20 < clock.total_s() < 24
    # It saved the step at which it stopped, and a restart continues from there: for one
    # step until the signal, and one in which the ranks agree to exit.
    assert ending.checkpoint == f"step-{ending.steps:09d}"
    run, later_ending = train_or_resume(signal_after=ending.steps + 1, max_steps=10_000)
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


def test_run_on_a_cpu_has_no_gpu_activity():
    run = run_of(max_steps=2)
    assert run.header.gpu_activity_missing == ["the run uses no GPU"]
    for row in run.steps:
        assert (row.gpu_busy_share, row.lowest_gpu_busy_rank) == (None, None)
        assert (row.sm_active_share, row.gpu_power_w) == (None, None)


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
    assert (ending.exit_code, ending.checkpoint) == (REQUEUE, None)
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
