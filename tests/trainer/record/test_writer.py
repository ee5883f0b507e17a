"""Run records, as they are written, shown and read back, also on a full disk."""

import contextlib
import errno
import os

import pytest

from testbed.examples.checkpoints import exit_of, header_of
from testbed.examples.run_rows import evaluation_of, event_of, row_of, startup_of
from trainer.formats import run_record
from trainer.health.watchdog import REQUEUE
from trainer.record.writer import RunWriter

ROWS = [row_of(1), row_of(2, loss=None), evaluation_of(2), event_of(2)]
"""Rows of all kinds."""
EXIT = exit_of(REQUEUE, checkpoint="step-000000002")
PIECE_BYTES = 20
"""Bytes that a disk takes at a time until it is full."""


def test_written_record_is_read_back(tmp_path):
    directory = tmp_path / "r"
    writer = RunWriter(directory)
    writer.start(header_of())
    writer.write_startup(startup_of())
    for row in ROWS:
        writer.append(row)
    writer.finish(EXIT)
    run = run_record.read_run(directory)
    assert run.header == header_of()
    assert run.steps == (row_of(1), row_of(2, loss=None))
    assert run.evaluations == (evaluation_of(2),)
    assert run.events == (event_of(2),)
    assert run.startup == startup_of()
    assert run.end == run_record.read_exit(directory) == EXIT


def test_header_is_shown_before_all_rows(tmp_path):
    shown = []
    writer = RunWriter(tmp_path / "r")
    writer.start(header_of(), shown.append)
    for row in ROWS:
        writer.append(row)
    assert shown == [header_of(), *ROWS]


def test_other_ranks_write_only_their_exit(tmp_path):
    directory = tmp_path / "r"
    shown = []
    writer = RunWriter(directory, records=False)
    writer.start(header_of(), shown.append)
    writer.write_startup(startup_of())
    for row in ROWS:
        writer.append(row)
    writer.close()
    assert shown == []
    assert not directory.exists()
    directory.mkdir()
    writer.finish(EXIT)
    assert run_record.read_exit(directory) == EXIT


@pytest.fixture
def full_disk(monkeypatch):
    """Function that returns a context in which the disk becomes full in every row."""
    write = os.write

    def write_or_fail(fd, content):
        # All but the last piece of a row fits, which leaves part of a line.
        if len(content) > PIECE_BYTES:
            return write(fd, content[:PIECE_BYTES])
        raise OSError(errno.ENOSPC, "No space left on device")

    @contextlib.contextmanager
    def fill_disk():
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_or_fail)
            yield

    return fill_disk


def test_full_disk_leaves_the_record_readable(tmp_path, full_disk):
    writer = RunWriter(tmp_path / "r")
    writer.start(header_of())
    writer.append(row_of(1))
    with full_disk():
        writer.append(row_of(2))
        assert writer.write_error == "No space left on device"
    assert run_record.read_run(tmp_path / "r").steps == (row_of(1),)
    assert (tmp_path / "r" / "steps.jsonl").read_bytes().endswith(b"}\n")


def test_rows_are_written_once_the_disk_has_space(tmp_path, full_disk):
    writer = RunWriter(tmp_path / "r")
    writer.start(header_of())
    with full_disk():
        writer.append(row_of(1))
        writer.append(event_of(1))
        writer.append(row_of(2))
    writer.append(row_of(3))
    assert writer.write_error is None
    run = run_record.read_run(tmp_path / "r")
    assert run.steps == (row_of(1), row_of(2), row_of(3))
    assert run.events == (event_of(1),)


def test_every_full_disk_is_shown_once(tmp_path, full_disk):
    shown = []
    writer = RunWriter(tmp_path / "r")
    writer.start(header_of(), shown.append)
    for step in (1, 3):
        with full_disk():
            writer.append(row_of(step))
            writer.append(event_of(step))
        writer.append(row_of(step + 1))
    run = run_record.read_run(tmp_path / "r")
    assert run.steps == (row_of(1), row_of(2), row_of(3), row_of(4))
    assert run.events == (event_of(1), event_of(3))
    errors = [row for row in shown if getattr(row, "kind", "") == "record_waits"]
    assert [error.step for error in errors] == [1, 3]
    assert {error.level for error in errors} == {"error"}
    assert "No space left on device" in errors[0].message
