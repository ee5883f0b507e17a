"""Memory and storage reads of a process and its children."""

import os
import subprocess
import sys

import psutil
import pytest

from autotune.trials.jobs import footprint

MIB = 2**20
HELD_BYTES = 40 * MIB
HOLD_MEMORY = f"""
import sys
held = bytearray(b"x" * {HELD_BYTES})
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holding_child():
    """Start a child that holds ``HELD_BYTES`` until the test ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_MEMORY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()  # it holds the memory now
        yield child
        child.stdin.close()  # lets it end


@pytest.mark.usefixtures("holding_child")
def test_memory_of_children_counts():
    own_bytes = psutil.Process().memory_full_info().pss
    assert footprint.memory_bytes() >= own_bytes + HELD_BYTES


@pytest.mark.usefixtures("holding_child")
def test_private_memory_is_that_of_each_child():
    assert max(footprint.private_bytes_of_children()) >= HELD_BYTES


def test_reads_from_storage_never_fall():
    first_bytes = footprint.storage_read_bytes()
    if first_bytes is None:
        pytest.skip("this kernel does not count what processes read")
    assert footprint.storage_read_bytes() >= first_bytes >= 0


def test_figures_of_an_ended_process_are_unknown(monkeypatch):
    def raise_no_such_process(_):
        raise psutil.NoSuchProcess(os.getpid())

    monkeypatch.setattr(psutil.Process, "memory_full_info", raise_no_such_process)
    monkeypatch.setattr(psutil.Process, "io_counters", raise_no_such_process)
    monkeypatch.setattr(
        psutil.Process, "children", lambda self, recursive=False: [self]
    )
    assert footprint.memory_bytes() is None
    assert footprint.private_bytes_of_children() == []
    assert footprint.storage_read_bytes() is None
