import subprocess
import sys
import threading
import time

import pytest

from trainer.staging.threads import in_threads

INTERRUPTED = """\
import os, signal, sys, threading, time
from trainer.staging.threads import in_threads
stopped = threading.Event()
kill = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
kill.daemon = True
kill.start()
work = lambda item: stopped.is_set() or item
try:
    for _ in range(100_000):
        in_threads(work, range(50), 4, stop=stopped.set)
        stopped.clear()
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_results_have_the_order_of_items():
    def slow_first(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    stopped: list[bool] = []
    squares = in_threads(slow_first, range(20), 4, stop=lambda: stopped.append(True))
    assert squares == [item * item for item in range(20)]
    assert stopped == []
    assert in_threads(slow_first, [], 4) == []


def test_uses_the_requested_number_of_threads():
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
        assert stop.wait(30)

    with pytest.raises(ValueError, match="one"):
        in_threads(work, range(100), 2, stop=stop.set)
    assert set(begun) <= {0, 1, 2}
    assert not any(
        thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()
    )


@pytest.mark.parametrize("moment_s", [0.1, 0.2, 0.3])
def test_ctrl_c_ends_threads_at_any_moment(moment_s):
    command = [sys.executable, "-c", INTERRUPTED, str(moment_s)]
    process = subprocess.run(command, timeout=60, check=False)
    assert process.returncode == 7
