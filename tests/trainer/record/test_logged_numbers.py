"""Numbers that TensorBoard and W&B get from the starts of a run."""

import pytest

from testbed.examples.checkpoints import header_of, release_run
from testbed.examples.run_rows import evaluation_of, row_of
from tests.trainer.record.wandb_files import numbers_logged_to_wandb
from trainer.record.boards import open_boards
from trainer.record.writer import RunWriter

FIRST_STEP = row_of(1, loss=2.5)
FIRST_EVALUATION = evaluation_of(1)
SECOND_STEP = row_of(2, loss=None)
"""A step whose loss is not finite, which boards do not log."""


def write_start(directory, logger, *, attempt, rows):
    """Write the rows of one start of a run, which are also logged to a board."""
    writer = RunWriter(directory, may_resume=True)
    # Each start takes one step, on its own day.
    header = header_of(
        resumed_step=attempt - 1, started_utc=f"2026-01-0{attempt}T00:00:00Z"
    )
    boards = open_boards(
        [logger, logger],  # it is opened once nevertheless
        directory,
        header,
        attempt=attempt,
        report_event=pytest.fail,
    )
    writer.start(header, boards=boards)
    for row in rows:
        writer.append(row)
    writer.close()
    release_run(writer)


def write_two_starts(directory, logger):
    write_start(directory, logger, attempt=1, rows=[FIRST_STEP, FIRST_EVALUATION])
    write_start(directory, logger, attempt=2, rows=[SECOND_STEP])


def numbers_of(group, row):
    """Return the numbers of a row that a board logs, by name and step."""
    numbers = row.model_dump(exclude={"step"}, exclude_none=True)
    return {(f"{group}/{name}", row.step): value for name, value in numbers.items()}


EXPECTED_NUMBERS = {
    **numbers_of("train", FIRST_STEP),
    **numbers_of("validation", FIRST_EVALUATION),
    **numbers_of("train", SECOND_STEP),
}


def numbers_logged_to_tensorboard(directory):
    """Return the numbers that TensorBoard shows, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    numbers = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            numbers[name, scalar.step] = scalar.value
    return numbers


def test_tensorboard_gets_numbers_of_all_starts(tmp_path):
    pytest.importorskip("tensorboard")
    write_two_starts(tmp_path, "tensorboard")
    # TensorBoard stores numbers in fp32.
    assert numbers_logged_to_tensorboard(tmp_path) == pytest.approx(EXPECTED_NUMBERS)


def test_wandb_gets_numbers_of_all_starts(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two_starts(tmp_path, "wandb")
    wandb.teardown()  # ends its child process
    assert numbers_logged_to_wandb(tmp_path) == pytest.approx(EXPECTED_NUMBERS)
