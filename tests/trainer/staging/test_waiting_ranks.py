"""Ranks that wait while another one copies the dataset."""

import multiprocessing
import multiprocessing.connection
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.system.faults.corpora import content
from tests.trainer.staging.locks import hold_lock
from trainer.formats.errors import BadConfig
from trainer.staging.stage import stage

READY = "ready"
"""Message of a rank that is about to stage."""
COPYING = "copying"
"""Message of a rank that has begun to copy."""
NO_REPORT_S = 1.5
"""Time without a report after which a rank counts as waiting: it would copy the dataset
of these tests in a small part of that."""


@dataclass(frozen=True)
class Report:
    """Result of staging in a rank."""

    directory: Path
    has_copied: bool


def _stage_and_report(source: Path, local: Path, parent: Connection) -> None:
    parent.send(READY)
    # The timeout is longer than the test.
    staged = stage(source, local, timeout_s=60)
    has_copied = staged.copied is not None
    parent.send(Report(directory=staged.directory, has_copied=has_copied))


def _copy_and_stall(source: Path, local: Path, parent: Connection) -> None:
    def stall(done, total, note):
        parent.send(COPYING)
        threading.Event().wait()

    stage(source, local, update=stall)


@pytest.fixture
def start_rank(source, local):
    """Return a function that starts a rank, which is killed after the test.

    The function returns the process and a connection to it.
    """
    # Spawned: a fork of this process would copy the locks of its threads.
    context = multiprocessing.get_context("spawn")
    processes = []

    def start(work):
        connection, parent = context.Pipe()
        process = context.Process(target=work, args=(source, local, parent))
        processes.append(process)
        process.start()
        # The rank has its own end now. If it dies, reading fails instead of waiting.
        parent.close()
        return process, connection

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_waiting_rank_copies_if_the_first_is_killed(source, local, start_rank):
    copying_process, copying_connection = start_rank(_copy_and_stall)
    assert copying_connection.recv() == COPYING
    waiting_ranks = []
    for _ in range(3):
        _, connection = start_rank(_stage_and_report)
        assert connection.recv() == READY
        waiting_ranks.append(connection)
    assert multiprocessing.connection.wait(waiting_ranks, NO_REPORT_S) == []
    copying_process.kill()
    reports = [connection.recv() for connection in waiting_ranks]

    directory = stage(source, local).directory
    assert {report.directory for report in reports} == {directory}
    assert sum(report.has_copied for report in reports) == 1
    assert content(directory) == content(source)
    assert list(local.rglob(".partial*")) == []


def test_reports_a_lock_held_too_long(source, local):
    staged = stage(source, local).directory
    lock = staged.with_name(f"{staged.name}.lock")
    message = r"another process is still copying .* after 0\.2 s"
    with hold_lock(lock), pytest.raises(BadConfig, match=message):
        stage(source, local, timeout_s=0.2)
    assert lock.exists()
