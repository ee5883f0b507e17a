"""Resumes of a run from its newest checkpoint, by its directory or by a path."""

import pytest

from testbed.examples.checkpoints import exit_of, write_run
from tests.trainer.checkpoint.starts import (
    CONFIG,
    assert_rejected,
    checkpoint_of,
    choose,
    messages_of,
)
from tests.trainer.tiny_models import config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import Start
from trainer.formats.errors import BadConfig
from trainer.formats.run_record import read_run
from trainer.health.watchdog import REQUEUE

pytestmark = pytest.mark.usefixtures("directory_without_runs")

with_or_without_out = pytest.mark.parametrize(
    "with_out",
    [pytest.param(False, id="without --out"), pytest.param(True, id="with --out")],
)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_new_run_is_in_the_requested_directory(tmp_path, resume):
    writer, start = choose(tmp_path / "r", resume)
    assert (writer.directory, writer.attempt) == (tmp_path / "r", 1)
    assert start == Start()


def test_new_run_is_named_by_model_and_time():
    writer, _ = choose(None)
    assert writer.directory.parts[0] == "runs"
    assert writer.directory.name.endswith("Z-m")


def test_auto_resumes_from_the_newest_checkpoint(run):
    writer, start = choose(run)
    assert (writer.directory, writer.attempt) == (run, 2)
    assert start.checkpoint == checkpoint_of(run, 10)
    assert (start.origin, start.manifest.state.step) == ("step-000000010", 10)
    assert messages_of(start) == ["resumed from step-000000010"]


@pytest.fixture
def partial_checkpoint(run):
    """Checkpoint of the run that was not finished."""
    partial = run / CHECKPOINTS_DIRECTORY / ".step-000000015.attempt-1.partial"
    partial.mkdir()
    return partial


def test_existing_run_is_rejected_unless_resumed(run, partial_checkpoint):
    with pytest.raises(BadConfig, match="already contains a run"):
        choose(run, "never")
    assert partial_checkpoint.exists()


def test_resume_removes_unfinished_checkpoints(run, partial_checkpoint):
    choose(run)
    assert not partial_checkpoint.exists()


def test_run_without_a_checkpoint_starts_from_scratch(tmp_path):
    writer, start = choose(write_run(tmp_path / "r", CONFIG, steps=()))
    assert (writer.attempt, start.checkpoint) == (2, None)
    assert start.events[0].level == "warning"
    assert "no intact checkpoint" in messages_of(start)[0]


@pytest.fixture
def finished_run(tmp_path):
    """A run that has taken all of its 20 steps."""
    run_exit = exit_of(0, steps=20)
    return write_run(tmp_path / "r", CONFIG, steps=(10, 20), run_exit=run_exit)


def test_finished_run_is_unchanged(finished_run):
    writer, start = choose(finished_run)
    assert start.finished == exit_of(0, steps=20)
    assert start.checkpoint is None
    assert read_run(finished_run).header.attempt == 1
    assert writer.directory == finished_run


def test_finished_run_resumes_with_more_steps(finished_run):
    # A start with the same steps, which only writes its exit, changes nothing for it.
    writer, _ = choose(finished_run)
    writer.finish(exit_of(0, steps=20))
    _, start = choose(finished_run, config=config_of(max_steps=30))
    assert (start.finished, start.manifest.state.step) == (None, 20)
    assert "train.max_steps is now 30, it was 20" in messages_of(start)[0]


def test_run_that_was_signalled_resumes(tmp_path):
    run = write_run(tmp_path / "r", CONFIG, steps=(5, 20), run_exit=exit_of(REQUEUE))
    _, start = choose(run)
    assert start.finished is None
    assert start.manifest.state.step == 20
    assert not start.gave_up


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("", id="run"),
        pytest.param("checkpoints", id="directory of checkpoints"),
        pytest.param("checkpoints/step-000000010", id="newest checkpoint"),
    ],
)
@with_or_without_out
def test_path_resumes_its_run(run, path, with_out):
    writer, start = choose(run if with_out else None, run / path)
    assert (writer.directory, start.manifest.state.step) == (run, 10)


def test_rejects_path_without_a_checkpoint(tmp_path):
    assert_rejected(None, tmp_path / "nowhere", message="no checkpoint found there")


def test_rejects_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert_rejected(tmp_path / "file" / "r", "auto", message="cannot write")


@with_or_without_out
def test_rejects_older_checkpoint_of_its_own_run(run, with_out):
    assert_rejected(
        run if with_out else None,
        checkpoint_of(run, 5),
        message="has newer checkpoints than step-000000005",
    )
