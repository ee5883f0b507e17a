import errno
import os

import pytest

from testbed.examples.checkpoints import (
    exit_of,
    header_of,
    release_run,
)
from testbed.examples.run_rows import evaluation_of, event_of, row_of, startup_of
from trainer.errors import BadConfig
from trainer.record import run_record
from trainer.record import writer as run_writer
from trainer.record.boards import open_boards
from trainer.record.writer import RunWriter


@pytest.fixture
def begin(tmp_path):
    """Function that starts a run again, after the start before it has ended."""
    writers = []

    def start(**changes) -> RunWriter:
        if writers:
            release_run(writers[-1])
        writers.append(RunWriter(tmp_path / "r", active=True, again=True))
        writers[-1].start(header_of(**changes))
        return writers[-1]

    return start


ROWS = [row_of(1), row_of(2, loss=None), evaluation_of(2), event_of(2)]
"""Rows of each kind."""


def test_reads_back_what_was_written(tmp_path):
    directory = tmp_path / "r"
    shown = []
    writer = RunWriter(directory, active=True)
    opened = open_boards(None, directory, header_of(), 1, pytest.fail)
    writer.start(header_of(), shown.append, opened)
    writer.started(startup_of())
    for row in ROWS:
        writer.append(row)
    writer.close()
    assert shown == [header_of(), *ROWS]
    end = exit_of(75, checkpoint="step-000000002")
    writer.finish(end)
    run = run_record.read_run(directory)
    assert run.header == header_of()
    assert run.steps == (row_of(1), row_of(2, loss=None))
    assert run.evaluations == (evaluation_of(2),)
    assert run.events == (event_of(2),)
    assert run.startup == startup_of()
    assert run.end == run_record.read_exit(directory) == end
    assert list((directory / run_record.TENSORBOARD_DIRECTORY).iterdir())


def test_other_ranks_write_only_their_exit(tmp_path):
    directory = tmp_path / "r"
    shown = []
    writer = RunWriter(directory, active=False)
    writer.start(header_of(), shown.append)
    writer.started(startup_of())
    for row in ROWS:
        writer.append(row)
    writer.close()
    assert shown == []
    assert not directory.exists()
    directory.mkdir()
    end = exit_of(75, checkpoint="step-000000002")
    writer.finish(end)
    assert run_record.read_exit(directory) == end


def test_tensorboard_hides_points_of_earlier_starts(tmp_path, monkeypatch):
    import torch.utils.tensorboard

    monkeypatch.setattr(
        torch.utils.tensorboard,
        "SummaryWriter",
        lambda **options: options["purge_step"],
    )
    opened = [
        open_boards(None, tmp_path, header_of(resumed_step=5), attempt, pytest.fail)[0]
        for attempt in (1, 2)
    ]
    assert [board._writer for board in opened] == [None, 6]


def test_repeated_steps_replace_earlier_rows(begin, tmp_path):
    first = begin()
    for step in (1, 2, 3, 4):
        first.append(row_of(step, loss=1.0))
        first.append(evaluation_of(step, loss=1.0))
        first.append(event_of(step))
    second = begin()
    second.append(row_of(3, loss=2.0))
    second.append(evaluation_of(2, loss=2.0))
    second.append(event_of(3))
    run = run_record.read_run(tmp_path / "r")
    assert [(row.step, row.loss) for row in run.steps] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert [(row.step, row.loss) for row in run.evaluations] == [(1, 1.0), (2, 2.0)]
    assert [row.step for row in run.events] == [1, 2, 3, 4, 3]


def test_torn_last_lines_are_ignored_then_cut(begin, tmp_path):
    first = begin()
    for step in (1, 2):
        first.append(row_of(step))
        first.append(evaluation_of(step))
        first.append(event_of(step))
    for name in ("steps", "evaluations", "events"):
        with (tmp_path / "r" / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 5, "ä')
    run = run_record.read_run(tmp_path / "r")
    assert [row.step for row in run.steps] == [1, 2]
    second = begin()
    second.append(row_of(3))
    second.append(evaluation_of(3))
    second.append(event_of(3))
    run = run_record.read_run(tmp_path / "r")
    for rows in (run.steps, run.evaluations, run.events):
        assert [row.step for row in rows] == [1, 2, 3]


def test_start_sets_the_earlier_one_aside(begin, tmp_path):
    first = begin()
    first.started(startup_of())
    first.finish(exit_of(75))
    resumed = {"resumed_from": "step-000000002", "resumed_step": 2, "job": "slurm-1"}
    second = begin(**resumed)
    run = run_record.read_run(tmp_path / "r")
    assert run.header == header_of(attempt=2, **resumed)
    assert run.startup is None
    assert run.end is None
    third = begin()
    assert [first.attempt, second.attempt, third.attempt] == [1, 2, 3]
    earlier = tmp_path / "r" / run_record.EARLIER_DIRECTORY
    assert {path.name for path in earlier.iterdir()} == {"1", "2"}
    assert {path.name for path in (earlier / "1").iterdir()} == {
        "exit.json",
        "run.json",
        "startup.json",
    }
    assert run_record.read_run(earlier / "1").end == exit_of(75)
    assert run_record.read_run(earlier / "2").header.attempt == 2


def test_rejects_directory_that_contains_a_run(begin, tmp_path):
    release_run(begin())
    with pytest.raises(BadConfig, match="already contains a run"):
        RunWriter(tmp_path / "r", active=True)


def test_start_without_header_keeps_the_last_one(begin, tmp_path):
    release_run(begin())
    release_run(RunWriter(tmp_path / "r", active=True, again=True))
    assert run_record.read_run(tmp_path / "r").header.attempt == 1
    assert RunWriter(tmp_path / "r", active=True, again=True).attempt == 3


def test_first_header_skips_start_without_one(tmp_path):
    directory = tmp_path / "r"
    # The first start ends before it writes a header.
    for attempt, origin in ((1, None), (2, "/other/checkpoint"), (3, "step-000000002")):
        writer = RunWriter(directory, active=True, again=True)
        assert writer.attempt == attempt
        assert run_record.read_exit(directory) is None
        if origin is not None:
            writer.start(header_of(resumed_from=origin))
        writer.finish(exit_of(75))
        release_run(writer)
    earlier = directory / run_record.EARLIER_DIRECTORY
    assert {path.name for path in (earlier / "1").iterdir()} == {"exit.json"}
    assert {path.name for path in (earlier / "2").iterdir()} == {
        "exit.json",
        "run.json",
    }
    assert run_record.read_first_header(directory).resumed_from == "/other/checkpoint"


def test_rows_wait_while_the_disk_is_full(tmp_path, monkeypatch):
    directory = tmp_path / "r"
    shown = []
    write = os.write
    writer = RunWriter(directory, active=True)
    writer.start(header_of(), shown.append)
    writer.append(row_of(1))

    def fill_up(fd, content):
        """Write the beginning of a row; the next write finds a full disk."""
        if len(content) > 20:
            return write(fd, content[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (2, 4):  # the disk fills up twice
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fill_up)
            writer.append(row_of(step))
            writer.append(event_of(step))
            assert writer.write_error == "No space left on device"
            assert run_record.read_run(directory).steps[-1] == row_of(step - 1)
            assert (directory / "steps.jsonl").read_bytes().endswith(b"}\n")
        writer.append(row_of(step + 1))
        assert writer.write_error is None
    run = run_record.read_run(directory)
    assert run.steps == tuple(row_of(step) for step in range(1, 6))
    assert run.events == (event_of(2), event_of(4))
    warnings = [row for row in shown if getattr(row, "kind", "") == "record_waits"]
    assert [warning.step for warning in warnings] == [2, 4]  # once each time
    assert "No space left on device" in warnings[0].message


def test_rejects_second_start_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(run_writer, "_LOCK_TIMEOUT_S", 0.2)
    holder = RunWriter(tmp_path / "r", active=True)
    with pytest.raises(BadConfig, match="another process is using"):
        RunWriter(tmp_path / "r", active=True, again=True)
    release_run(holder)
    assert RunWriter(tmp_path / "r", active=True, again=True).attempt == 1
