"""Threads: results in order, the first error, and Ctrl-C."""

import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from trainer.staging.threads import run_in_threads

TIMEOUT_S = 30
"""Only a fault waits as long."""
INTERRUPTED_EXIT_CODE = 7
INTERRUPTED_PROGRAM = f"""\
import os, signal, sys, threading
from trainer.staging.threads import run_in_threads
interrupt = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
interrupt.daemon = True
interrupt.start()
try:
    while True:
        run_in_threads(str, range(50), 4)
except KeyboardInterrupt:
    sys.exit({INTERRUPTED_EXIT_CODE})
"""
"""Program that interrupts itself after as many seconds as its argument says.

It runs threads again and again: an executor holds its locks only briefly, and the
signal has to meet many of these moments.
"""


def test_results_have_the_order_of_items():
    items = range(20)
    last_has_ended = threading.Event()

    def square(item: int) -> int:
        # The first item ends last.
        if item == items[0]:
            assert last_has_ended.wait(TIMEOUT_S)
        if item == items[-1]:
            last_has_ended.set()
        return item * item

    squares = run_in_threads(square, items, 4)
    assert squares == [item * item for item in items]


def test_nothing_is_stopped_without_an_error():
    stop = Mock()
    run_in_threads(str, range(20), 4, stop=stop)
    assert stop.call_count == 0


def test_no_items_have_no_results():
    assert run_in_threads(str, [], 4) == []


def test_uses_the_requested_number_of_threads():
    # It opens only for three threads at once.
    barrier = threading.Barrier(3, timeout=TIMEOUT_S)

    def wait_for_others(_) -> str:
        barrier.wait()
        return threading.current_thread().name

    names = run_in_threads(wait_for_others, range(9), 3)
    assert len(set(names)) == 3


def test_first_error_stops_all_threads():
    threads_before = set(threading.enumerate())
    stop = threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("one")
        # The other thread works until it is stopped.
        assert stop.wait(TIMEOUT_S)

    with pytest.raises(ValueError, match="one"):
        run_in_threads(work, range(100), 2, stop=stop.set)
    # Items are taken in order, and none after the error.
    assert set(begun) <= {0, 1}
    assert set(threading.enumerate()) <= threads_before


# Samples of the moments at which a user may press Ctrl-C.
@pytest.mark.parametrize("moment_s", [0.1, 0.2, 0.3])
def test_ctrl_c_ends_threads(moment_s):
    command = [sys.executable, "-c", INTERRUPTED_PROGRAM, str(moment_s)]
    process = subprocess.run(command, timeout=2 * TIMEOUT_S, check=False)
    assert process.returncode == INTERRUPTED_EXIT_CODE
