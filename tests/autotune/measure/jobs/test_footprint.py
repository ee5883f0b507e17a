import os
import subprocess
import sys

import psutil
import pytest

from autotune.measure.jobs import footprint

HOLDS = "import sys\nheld = bytearray(b'x' * 40 * 2**20)\nprint(flush=True)\nsys.stdin.read()"


@pytest.fixture
def child():
    """A process that holds 40 MiB."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.stdin.close()


def test_children_count_towards_the_memory_and_are_told_apart(child):
    alone = psutil.Process().memory_full_info().pss
    assert footprint.memory_bytes() >= alone + 40 * 2**20
    assert max(footprint.private_bytes_of_children()) >= 40 * 2**20


def test_reads_from_storage_never_fall():
    first = footprint.storage_read_bytes()
    if first is None:
        pytest.skip("this kernel does not count what processes read")
    assert footprint.storage_read_bytes() >= first >= 0


def test_a_process_that_ends_meanwhile_makes_figures_unknown_and_not_wrong(monkeypatch):
    def gone(_):
        raise psutil.NoSuchProcess(os.getpid())

    monkeypatch.setattr(psutil.Process, "memory_full_info", gone)
    monkeypatch.setattr(psutil.Process, "io_counters", gone)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [self])
    assert footprint.memory_bytes() is None
    assert footprint.private_bytes_of_children() == []
    assert footprint.storage_read_bytes() is None
