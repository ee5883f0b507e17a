import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from trainer.staging.threads import in_threads

INTERRUPTED_EXIT_CODE = 7
INTERRUPTED = f"""\
import os, signal, sys, threading
from trainer.staging.threads import in_threads
stopped = threading.Event()
interrupt = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
interrupt.daemon = True
interrupt.start()
work = lambda item: stopped.is_set() or item
try:
    while True:
        in_threads(work, range(50), 4, stop=stopped.set)
        stopped.clear()
except KeyboardInterrupt:
    sys.exit({INTERRUPTED_EXIT_CODE})
"""
"""Program that runs threads again and again until it interrupts itself, after as many
seconds as its argument says."""


def test_results_have_the_order_of_items():
    last_has_ended = threading.Event()

    def square(item: int) -> int:
        # The first item ends last.
        if item == 0:
            assert last_has_ended.wait(30)
        if item == 19:
            last_has_ended.set()
        return item * item

    squares = in_threads(square, range(20), 4)
    assert squares == [item * item for item in range(20)]


def test_nothing_is_stopped_without_an_error():
    stop = Mock()
    in_threads(str, range(20), 4, stop=stop)
    assert stop.call_count == 0


def test_no_items_have_no_results():
    assert in_threads(str, [], 4) == []


def test_uses_the_requested_number_of_threads():
    # It opens only for three threads at once.
    barrier = threading.Barrier(3, timeout=30)

    def wait_for_others(_) -> str:
        barrier.wait()
        return threading.current_thread().name

    names = in_threads(wait_for_others, range(9), 3)
    assert len(set(names)) == 3


def test_first_error_stops_all_threads():
    stop = threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("one")
        # The other thread works until it is stopped.
        assert stop.wait(30)

    with pytest.raises(ValueError, match="one"):
        in_threads(work, range(100), 2, stop=stop.set)
    # Items are taken in order, and none after the error.
    assert set(begun) <= {0, 1}
    assert not any(
        thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()
    )


@pytest.mark.parametrize("moment_s", [0.1, 0.2, 0.3])
def test_ctrl_c_ends_threads_at_any_moment(moment_s):
    command = [sys.executable, "-c", INTERRUPTED, str(moment_s)]
    process = subprocess.run(command, timeout=60, check=False)
    assert process.returncode == INTERRUPTED_EXIT_CODE
