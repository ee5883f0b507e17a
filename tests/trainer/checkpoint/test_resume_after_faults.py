"""Resumes of runs that gave up, or whose checkpoints are corrupt or unreachable."""

import errno
from pathlib import Path

import pytest

from testbed.examples.checkpoints import (
    exit_of,
    failing_method,
    header_of,
    release_run,
    resolved_of,
    write_checkpoint,
    write_run,
)
from tests.trainer.checkpoint.saves import SHARE
from tests.trainer.checkpoint.starts import (
    CONFIG,
    GAVE_UP,
    LOWER_RATE,
    checkpoint_of,
    choose,
    corrupt,
    messages_of,
    names_in,
)
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import choose_run
from trainer.checkpoint.stored_checkpoints import prune
from trainer.formats.errors import BadConfig, DiskTrouble, TrainingFailed
from trainer.health.watchdog import REQUEUE

pytestmark = pytest.mark.usefixtures("directory_without_runs")


@pytest.fixture
def run_that_gave_up(tmp_path):
    """A run that gave up, whose first checkpoint is good."""
    run_exit = exit_of(GAVE_UP, reason="nothing helped")
    return write_run(tmp_path / "r", CONFIG, run_exit=run_exit, good=False)


def test_run_that_gave_up_rejects_the_same_settings(run_that_gave_up):
    for _ in range(2):  # the first try changes nothing
        with pytest.raises(
            TrainingFailed,
            match="gave up before with the same settings: nothing helped",
        ):
            choose(run_that_gave_up)


def test_gave_up_run_resumes_from_a_good_checkpoint(run_that_gave_up):
    writer, start = choose(run_that_gave_up, config=LOWER_RATE)
    assert (writer.attempt, start.manifest.state.step) == (2, 5)
    assert "train.learning_rate is now 1e-05, it was 0.0001" in messages_of(start)[0]
    assert (start.gave_up, start.events[0].level) == (True, "warning")


def test_later_starts_resume_from_newer_checkpoints(run_that_gave_up):
    # The checkpoint of step 10, from before the run gave up, must not seem the newest.
    writer, _ = choose(run_that_gave_up, config=LOWER_RATE)
    writer.start(header_of(LOWER_RATE))
    root = run_that_gave_up / CHECKPOINTS_DIRECTORY
    for step in (6, 7):
        write_checkpoint(root, step, config=LOWER_RATE.model_dump(mode="json"))
        prune(root, keep_last=2, keep_every_steps=None)
    _, start = choose(run_that_gave_up, config=LOWER_RATE)
    assert start.manifest.state.step == 7


def test_corrupt_newest_checkpoint_is_put_aside(run):
    root = run / CHECKPOINTS_DIRECTORY
    corrupt(checkpoint_of(run, 10))
    _, start = choose(run)
    assert start.manifest.state.step == 5
    put_aside = root / "step-000000010.corrupt-2"
    assert (put_aside / SHARE).read_bytes() == b"short"
    assert (root / "latest").read_text() == "step-000000005\n"


def test_corrupt_checkpoint_is_reported_once(run):
    corrupt(checkpoint_of(run, 10))
    _, start = choose(run)
    assert [event.level for event in start.events] == ["error", "info"]
    assert "step-000000010 is corrupt and is skipped: " in messages_of(start)[0]
    assert "5 bytes, expected 1,024" in messages_of(start)[0]
    _, next_start = choose(run)
    assert messages_of(next_start) == ["resumed from step-000000005"]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param("open", "manifest.json", id="manifest"),
        pytest.param("open", SHARE, id="tensors"),
        pytest.param("iterdir", CHECKPOINTS_DIRECTORY, id="directory"),
    ],
)
def test_unreachable_checkpoints_stay_for_the_next_start(
    run, monkeypatch, method, name
):
    opened = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, failing_method(name, errno.ESTALE, method))
        with pytest.raises(DiskTrouble) as raised:
            choose_run(
                run,
                "auto",
                resolved_of(CONFIG),
                environment={},
                on_open=opened.append,
            )
    (writer,) = opened  # so that the exit of that start is recorded
    assert (writer.directory, writer.attempt) == (run, 2)
    release_run(writer)
    assert raised.value.exit_code == REQUEUE
    assert names_in(run) == ["step-000000005", "step-000000010"]
    _, start = choose(run)
    assert start.manifest.state.step == 10


def test_run_with_only_corrupt_checkpoints_never_restarts(run):
    corrupt(checkpoint_of(run, 5), checkpoint_of(run, 10))
    for _ in range(2):  # as torchrun with --max-restarts does
        with pytest.raises(BadConfig, match="all 2 checkpoints of") as raised:
            choose(run)
        assert "another --out" in raised.value.next_step
    assert names_in(run) == ["step-000000005.corrupt-2", "step-000000010.corrupt-2"]


def test_run_without_a_good_checkpoint_starts_from_scratch(tmp_path):
    run = write_run(tmp_path / "r", CONFIG, steps=(), run_exit=exit_of(GAVE_UP))
    for step in (5, 10):
        write_checkpoint(
            run / CHECKPOINTS_DIRECTORY,
            step,
            good=False,
            config=CONFIG.model_dump(mode="json"),
        )
    writer, start = choose(run, config=LOWER_RATE)
    assert (writer.attempt, start.checkpoint, start.manifest) == (2, None, None)
    assert names_in(run) == ["step-000000005.given-up-2", "step-000000010.given-up-2"]
    assert start.events[-1].level == "warning"
    assert messages_of(start) == [
        f"{run} has no good checkpoint; starting from scratch"
    ]
