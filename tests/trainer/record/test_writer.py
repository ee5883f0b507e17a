import contextlib
import errno
import os

import pytest

from testbed.examples.checkpoints import exit_of, header_of, release_run
from testbed.examples.run_rows import evaluation_of, event_of, row_of, startup_of
from trainer.errors import BadConfig
from trainer.health.watchdog import REQUEUE
from trainer.record import run_record
from trainer.record import writer as run_writer
from trainer.record.writer import RunWriter

ROWS = [row_of(1), row_of(2, loss=None), evaluation_of(2), event_of(2)]
"""Rows of all kinds."""
EXIT = exit_of(REQUEUE, checkpoint="step-000000002")


@pytest.fixture
def begin(tmp_path):
    """Function that starts a run in "r", which it resumes from the second call on.

    The start before it has ended, as if its process had.
    """
    writers = []

    def start(**changes) -> RunWriter:
        if writers:
            release_run(writers[-1])
        writers.append(RunWriter(tmp_path / "r", may_resume=True))
        writers[-1].start(header_of(**changes))
        return writers[-1]

    return start


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
    # The process is killed while it writes a row of each file.
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


def test_start_sets_the_last_one_aside(begin, tmp_path):
    first = begin()
    first.write_startup(startup_of())
    first.finish(EXIT)
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
    assert run_record.read_run(earlier / "1").end == EXIT
    assert run_record.read_run(earlier / "2").header.attempt == 2


def test_rejects_directory_that_contains_a_run(begin, tmp_path):
    release_run(begin())
    with pytest.raises(BadConfig, match="already contains a run"):
        RunWriter(tmp_path / "r")


def test_start_without_a_header_counts(begin, tmp_path):
    release_run(begin())
    # The second start ends before it writes a header, so the first one's stays.
    release_run(RunWriter(tmp_path / "r", may_resume=True))
    assert run_record.read_run(tmp_path / "r").header.attempt == 1
    assert RunWriter(tmp_path / "r", may_resume=True).attempt == 3


def test_first_header_skips_start_without_one(begin, tmp_path):
    directory = tmp_path / "r"
    # The first start fails before it writes a header.
    first = RunWriter(directory)
    first.finish(EXIT)
    release_run(first)
    for attempt, origin in ((2, "/other/checkpoint"), (3, "step-000000002")):
        writer = begin(resumed_from=origin)
        assert writer.attempt == attempt
        assert run_record.read_exit(directory) is None
        writer.finish(EXIT)
    earlier = directory / run_record.EARLIER_DIRECTORY
    assert {path.name for path in (earlier / "1").iterdir()} == {"exit.json"}
    assert {path.name for path in (earlier / "2").iterdir()} == {
        "exit.json",
        "run.json",
    }
    assert run_record.read_first_header(directory).resumed_from == "/other/checkpoint"


@pytest.fixture
def full_disk(monkeypatch):
    """Function that returns a context in which the disk is full."""
    write = os.write

    def write_or_fail(fd, content):
        """Write the beginning of a row; the next write finds a full disk."""
        if len(content) > 20:
            return write(fd, content[:20])
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


def test_rejects_second_start_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(run_writer, "_LOCK_TIMEOUT_S", 0.2)  # of 30 s
    holder = RunWriter(tmp_path / "r")
    with pytest.raises(BadConfig, match="another process is using"):
        RunWriter(tmp_path / "r", may_resume=True)
    release_run(holder)
    assert RunWriter(tmp_path / "r", may_resume=True).attempt == 1


def test_start_that_fails_releases_its_lock(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(run_writer, "_LOCK_TIMEOUT_S", 0.2)  # of 30 s
    release_run(begin())
    earlier = tmp_path / "r" / run_record.EARLIER_DIRECTORY
    earlier.write_text("")  # no directory can be made in its place
    with pytest.raises(FileExistsError):
        RunWriter(tmp_path / "r", may_resume=True)
    earlier.unlink()
    assert RunWriter(tmp_path / "r", may_resume=True).attempt == 2
