"""Boards that a run opens, and boards that fail."""

import errno
import sys

import pytest

from testbed.examples.checkpoints import header_of
from testbed.examples.run_rows import row_of
from trainer.formats.run_record import TENSORBOARD_DIRECTORY, read_run
from trainer.record.boards import open_boards
from trainer.record.writer import RunWriter


class FullBoard:
    """Board whose disk is full."""

    name = "wandb"

    def __init__(self):
        self.tried_to_close = False

    def add(self, step, numbers):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        self.tried_to_close = True
        raise OSError(errno.ENOSPC, "No space left on device")


def test_tensorboard_is_the_default_board(tmp_path):
    pytest.importorskip("tensorboard")
    writer = RunWriter(tmp_path)
    boards = open_boards(
        None, tmp_path, header_of(), attempt=1, report_event=pytest.fail
    )
    writer.start(header_of(), boards=boards)
    writer.append(row_of(1))
    writer.close()
    assert list((tmp_path / TENSORBOARD_DIRECTORY).iterdir())


@pytest.mark.parametrize(
    ("attempt", "purge_step"),
    [
        pytest.param(1, None, id="first start"),
        # It resumes from step 5, so that it repeats the steps from the sixth on.
        pytest.param(2, 6, id="second start"),
    ],
)
def test_tensorboard_hides_points_of_repeated_steps(
    tmp_path, monkeypatch, attempt, purge_step
):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    purge_steps = []

    def open_writer(*, log_dir, purge_step):
        purge_steps.append(purge_step)

    monkeypatch.setattr(tensorboard, "SummaryWriter", open_writer)
    open_boards(
        ["tensorboard"],
        tmp_path,
        header_of(resumed_step=5),
        attempt=attempt,
        report_event=pytest.fail,
    )
    assert purge_steps == [purge_step]


def test_board_that_cannot_open_is_reported(tmp_path, monkeypatch):
    events = []
    monkeypatch.setitem(sys.modules, "wandb", None)  # its import fails
    boards = open_boards(
        ["wandb"], tmp_path, header_of(), attempt=1, report_event=events.append
    )
    assert boards == []
    assert [event.kind for event in events] == ["board_failed"]


def test_failed_board_is_reported_once(tmp_path):
    writer = RunWriter(tmp_path)
    writer.start(header_of(), boards=[FullBoard()])
    writer.append(row_of(1))
    writer.append(row_of(2))
    run = read_run(tmp_path)
    assert len(run.steps) == 2
    assert [(event.kind, event.step) for event in run.events] == [("board_failed", 1)]
    assert "No space left on device; training continues" in run.events[0].message


def test_board_that_cannot_close_ends_no_run(tmp_path):
    board = FullBoard()
    other_board = FullBoard()
    writer = RunWriter(tmp_path)
    writer.start(header_of(), boards=[board, other_board])
    writer.close()  # raises no error
    assert board.tried_to_close
    assert other_board.tried_to_close
