"""Runs that several starts write one after the other, and starts at the same time."""

import pytest

from testbed.examples.checkpoints import exit_of, header_of, release_run
from testbed.examples.run_rows import evaluation_of, event_of, row_of, startup_of
from trainer.formats import run_record
from trainer.formats.errors import BadConfig
from trainer.health.watchdog import REQUEUE
from trainer.record import writer as run_writer
from trainer.record.writer import RunWriter

EXIT = exit_of(REQUEUE, checkpoint="step-000000002")


@pytest.fixture
def short_lock_timeout(monkeypatch):
    """Let a start wait for the lock of another one only briefly, not for 30 s."""
    monkeypatch.setattr(run_writer, "_LOCK_TIMEOUT_S", 0.2)


@pytest.fixture
def start_run(tmp_path):
    """Function that starts a run in "r", which it resumes from the second call on.

    Each call releases the run of the start before it, as a process that ends does.
    """
    writers = []

    def start(**changes) -> RunWriter:
        if writers:
            release_run(writers[-1])
        writers.append(RunWriter(tmp_path / "r", may_resume=True))
        writers[-1].start(header_of(**changes))
        return writers[-1]

    return start


def test_repeated_steps_replace_earlier_rows(start_run, tmp_path):
    first = start_run()
    for step in (1, 2, 3, 4):
        first.append(row_of(step, loss=1.0))
        first.append(evaluation_of(step, loss=1.0))
        first.append(event_of(step))
    second = start_run()
    second.append(row_of(3, loss=2.0))
    second.append(evaluation_of(2, loss=2.0))
    second.append(event_of(3))
    run = run_record.read_run(tmp_path / "r")
    assert [(row.step, row.loss) for row in run.steps] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert [(row.step, row.loss) for row in run.evaluations] == [(1, 1.0), (2, 2.0)]
    assert [row.step for row in run.events] == [1, 2, 3, 4, 3]


def test_torn_last_lines_are_ignored_then_cut(start_run, tmp_path):
    first = start_run()
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
    second = start_run()
    second.append(row_of(3))
    second.append(evaluation_of(3))
    second.append(event_of(3))
    run = run_record.read_run(tmp_path / "r")
    for rows in (run.steps, run.evaluations, run.events):
        assert [row.step for row in rows] == [1, 2, 3]


def test_start_sets_the_last_one_aside(start_run, tmp_path):
    first = start_run()
    first.write_startup(startup_of())
    first.finish(EXIT)
    resumed = {"resumed_from": "step-000000002", "resumed_step": 2, "job": "slurm-1"}
    second = start_run(**resumed)
    run = run_record.read_run(tmp_path / "r")
    assert run.header == header_of(attempt=2, **resumed)
    assert run.startup is None
    assert run.end is None
    third = start_run()
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


def test_rejects_directory_that_contains_a_run(start_run, tmp_path):
    release_run(start_run())
    with pytest.raises(BadConfig, match="already contains a run"):
        RunWriter(tmp_path / "r")


def test_start_without_a_header_counts(start_run, tmp_path):
    release_run(start_run())
    # The second start ends before it writes a header, so the first one's stays.
    release_run(RunWriter(tmp_path / "r", may_resume=True))
    assert run_record.read_run(tmp_path / "r").header.attempt == 1
    assert RunWriter(tmp_path / "r", may_resume=True).attempt == 3


def test_first_header_skips_start_without_one(start_run, tmp_path):
    directory = tmp_path / "r"
    # The first start fails before it writes a header.
    first = RunWriter(directory)
    first.finish(EXIT)
    release_run(first)
    second = start_run(resumed_from="/other/checkpoint")
    assert run_record.read_exit(directory) is None
    second.finish(EXIT)
    third = start_run(resumed_from="step-000000002")
    assert [second.attempt, third.attempt] == [2, 3]
    assert run_record.read_exit(directory) is None
    earlier = directory / run_record.EARLIER_DIRECTORY
    assert {path.name for path in (earlier / "1").iterdir()} == {"exit.json"}
    assert {path.name for path in (earlier / "2").iterdir()} == {
        "exit.json",
        "run.json",
    }
    assert run_record.read_first_header(directory).resumed_from == "/other/checkpoint"


@pytest.mark.usefixtures("short_lock_timeout")
def test_rejects_second_start_meanwhile(tmp_path):
    holder = RunWriter(tmp_path / "r")
    with pytest.raises(BadConfig, match="another process is using"):
        RunWriter(tmp_path / "r", may_resume=True)
    release_run(holder)
    assert RunWriter(tmp_path / "r", may_resume=True).attempt == 1


@pytest.mark.usefixtures("short_lock_timeout")
def test_start_that_fails_releases_its_lock(start_run, tmp_path):
    release_run(start_run())
    earlier = tmp_path / "r" / run_record.EARLIER_DIRECTORY
    earlier.write_text("")  # no directory can be made in its place
    with pytest.raises(FileExistsError):
        RunWriter(tmp_path / "r", may_resume=True)
    earlier.unlink()
    assert RunWriter(tmp_path / "r", may_resume=True).attempt == 2
