import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer.copying import in_threads

INTERRUPTED = """\
import os, signal, sys, threading, time
from trainer.copying import in_threads
stopped = threading.Event()
kill = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
kill.daemon = True
kill.start()
try:
    for _ in range(100_000):
        in_threads(lambda item: stopped.is_set() or item, range(50), 4, stop=stopped.set)
        stopped.clear()
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_results_come_in_the_order_of_the_items_whoever_was_first():
    def slow_first(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    assert in_threads(slow_first, range(20), 4) == [item * item for item in range(20)]
    assert in_threads(slow_first, [], 4) == []


def test_several_work_at_once_and_no_more_than_asked_for():
    barrier = threading.Barrier(3, timeout=30)
    names = in_threads(lambda _: (barrier.wait(), threading.current_thread().name)[1], range(9), 3)
    assert len(set(names)) == 3


def test_the_first_error_is_raised_others_are_asked_to_stop_and_nothing_more_is_begun():
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
    assert not [one for one in threading.enumerate() if one.name.startswith("ThreadPoolExecutor")]


def test_nothing_is_asked_to_stop_where_all_went_well():
    stopped: list[bool] = []
    in_threads(lambda item: item, range(5), 2, stop=lambda: stopped.append(True))
    assert stopped == []


@pytest.fixture
def own_handler():
    """Ctrl-C as Python has it: a library that another test imports may have taken it over."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("own_handler")
def test_ctrl_c_while_it_waits_ends_what_is_under_way():
    stop = threading.Event()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        in_threads(lambda _: stop.wait(30), range(4), 2, stop=stop.set)
    assert stop.is_set()


@pytest.mark.parametrize("moment_s", [0.1, 0.2, 0.3])
def test_ctrl_c_at_any_moment_ends_it(moment_s):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(moment_s)], timeout=60, check=False)
    assert done.returncode == 7
