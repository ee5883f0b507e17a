"""Starts of a run from a checkpoint of another one."""

import pytest

from testbed.examples.checkpoints import (
    exit_of,
    header_of,
    write_checkpoint,
    write_run,
)
from tests.trainer.checkpoint.starts import (
    CONFIG,
    GAVE_UP,
    assert_rejected,
    checkpoint_of,
    choose,
    corrupt,
    messages_of,
)
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.formats.errors import BadConfig

pytestmark = pytest.mark.usefixtures("directory_without_runs")


@pytest.mark.parametrize(
    ("path", "step"),
    [
        pytest.param("", 10, id="newest of a run"),
        pytest.param("checkpoints/step-000000005", 5, id="older checkpoint"),
    ],
)
def test_another_run_starts_from_a_checkpoint(tmp_path, path, step):
    # How the run ended is of no importance to another one.
    run = write_run(tmp_path / "r", CONFIG, run_exit=exit_of(GAVE_UP))
    writer, start = choose(tmp_path / "other", run / path)
    assert (writer.directory, writer.attempt) == (tmp_path / "other", 1)
    checkpoint = checkpoint_of(run, step)
    assert (start.checkpoint, start.manifest.state.step) == (checkpoint, step)
    assert start.origin == str(checkpoint)
    assert messages_of(start) == [f"started from {checkpoint}"]


def test_another_run_skips_a_corrupt_checkpoint(run, tmp_path):
    corrupt(checkpoint_of(run, 10))
    _, start = choose(tmp_path / "other", run)
    assert start.manifest.state.step == 5
    assert checkpoint_of(run, 10).is_dir()  # it stays in its run
    assert "corrupt and is skipped" in messages_of(start)[0]


def test_rejects_corrupt_checkpoint_by_path(run, tmp_path):
    corrupt(checkpoint_of(run, 10))
    with pytest.raises(BadConfig, match="the checkpoint is corrupt"):
        choose(tmp_path / "other", checkpoint_of(run, 10))
    assert not (tmp_path / "other").exists()


def test_rejects_directory_of_another_run(run, tmp_path):
    other = write_run(tmp_path / "other", CONFIG)
    assert_rejected(other, run, message="already contains a run")


def test_rejects_run_without_checkpoints_as_origin(tmp_path):
    empty = write_run(tmp_path / "empty", CONFIG, steps=())
    (empty / CHECKPOINTS_DIRECTORY).mkdir()
    assert_rejected(tmp_path / "other", empty, message="has no intact checkpoint")


@pytest.fixture
def origin(run):
    """Checkpoint from which ``other_run`` started."""
    return checkpoint_of(run, 5)


@pytest.fixture
def other_run(origin, tmp_path):
    """A run that started from ``origin``, and has no checkpoint of its own."""
    other_run = tmp_path / "other"
    writer, start = choose(other_run, origin)
    writer.start(header_of(CONFIG, resumed_from=start.origin, resumed_step=5))
    return other_run


def test_run_without_checkpoints_starts_from_its_origin_again(origin, other_run):
    for attempt, resume in enumerate(("auto", origin, "auto"), start=2):
        writer, start = choose(other_run, resume)
        assert (writer.directory, writer.attempt) == (other_run, attempt)
        assert (start.checkpoint, start.manifest.state.step) == (origin, 5)
        assert start.from_other_run
        assert start.origin == str(origin)
        writer.start(header_of(CONFIG, resumed_from=start.origin, resumed_step=5))
    assert "starting again from" in messages_of(start)[0]


def test_rejects_start_from_a_corrupt_origin(origin, other_run):
    corrupt(origin)
    with pytest.raises(BadConfig, match="the checkpoint is corrupt"):
        choose(other_run)


def test_own_checkpoints_take_precedence_over_the_origin(origin, other_run):
    write_checkpoint(
        other_run / CHECKPOINTS_DIRECTORY, 6, config=CONFIG.model_dump(mode="json")
    )
    _, start = choose(other_run, origin)
    assert (start.origin, start.from_other_run) == ("step-000000006", False)
