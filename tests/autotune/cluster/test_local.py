import os
import signal
import subprocess
import sys
import time

from autotune.cluster.local import run_child

CHILD = """
import signal, sys, time
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, heard)
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, sys
from autotune.cluster.local import run_child
sys.exit(run_child([sys.executable, "-c", {CHILD!r}], os.environ))
"""


def test_the_childs_code_is_returned_and_signals_are_as_before():
    before = signal.getsignal(signal.SIGINT)
    assert run_child([sys.executable, "-c", "raise SystemExit(5)"], os.environ) == 5
    assert signal.getsignal(signal.SIGINT) is before


def signalled(number: int) -> tuple[int, list[str]]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=30)
    return parent.returncode, out.split()


def test_signals_are_passed_on_and_those_that_torchrun_does_not_know_as_one_it_knows():
    assert signalled(signal.SIGTERM) == (7, ["SIGTERM"])
    assert signalled(signal.SIGINT) == (7, ["SIGINT"])
    assert signalled(signal.SIGUSR1) == (7, ["SIGTERM"])


def test_a_child_does_not_outlive_the_process_that_started_it():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()
    (child,) = [int(pid) for pid in _children(parent.pid)]
    parent.kill()
    parent.wait()
    deadline_s = time.monotonic() + 10
    while _is_alive(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    parent.stdout.close()


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123 - a file of the kernel's
        return file.read().split()


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - a file of the kernel's
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
