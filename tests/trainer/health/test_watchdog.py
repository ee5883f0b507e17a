"""A watchdog, in programs that receive signals, hang or are suspended.

The programs are processes, as the watchdog ends its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from trainer.health.signals import SIGNALS, ignore_signals
from trainer.health.watchdog import _POLL_S, REQUEUE, SAME_SIGNAL_S

SLEEP_S = 30
"""Time for which a program hangs unless the watchdog ends it."""
END_TIMEOUT_S = 20
"""Longest wait for the end of a program, which must come before it wakes up."""
FINISHED_STEPS = 7
PATIENCE_S = 0.5
"""Seconds after a signal before a program records it."""
PROGRAM = f"""
import ctypes, json, os, signal, sys, time
from pathlib import Path
from trainer.health import watchdog
# Short, as these tests wait for them.
watchdog.PATIENCE_S = {PATIENCE_S}
watchdog._LAST_RESORT_S = 0.7
watchdog._REARM_EVERY_S = 0.1

def record(reason, step, *, is_likely):
    row = dict(reason=reason, step=step, is_likely=is_likely)
    with (directory / "exits.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")

def sleep_in_c():
    time.sleep({SLEEP_S})

def keep_the_interpreter():
    # Unlike a CDLL, it does not release the interpreter while it calls a function.
    ctypes.PyDLL(None).sleep({SLEEP_S})

directory = Path(sys.argv[1])
dog = watchdog.Watchdog(timeout_s=float(sys.argv[2]), record=record)
dog.traceback_file = directory / "traceback.txt"
dog.start()
dog.heartbeat({FINISHED_STEPS})
print("ready", flush=True)
"""
"""Beginning of every program, which has finished some steps."""
WAIT_FOR_SIGNAL = "while dog.first_signal is None: time.sleep(0.01)\n"


@pytest.fixture
def start_program(tmp_path):
    """Return a function that starts a program and waits until its watchdog runs.

    Its arguments are the program's code after ``PROGRAM``, the watchdog's timeout, and
    code before ``PROGRAM``.
    """
    processes = []

    def start(body, timeout_s=60.0, before=""):
        process = subprocess.Popen(
            [sys.executable, "-c", before + PROGRAM + body, tmp_path, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class RecordedExit:
    """Exit that a program recorded."""

    reason: str
    step: int
    is_likely: bool


def recorded_exits(tmp_path) -> list[RecordedExit]:
    path = tmp_path / "exits.jsonl"
    if not path.exists():
        return []
    return [RecordedExit(**json.loads(line)) for line in path.read_text().splitlines()]


def test_signals_within_a_second_are_one_request(start_program, tmp_path):
    process = start_program(
        # Longer than the signals take, and shorter than a second.
        "time.sleep(0.7)\nprint(dog.first_signal, dog.step)\ndog.stop()\nsys.exit(9)"
    )
    process.send_signal(signal.SIGUSR1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        time.sleep(0.1)  # or the kernel may deliver them in another order
        process.send_signal(number)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 9, stderr
    assert stdout == f"{signal.SIGUSR1.value} {FINISHED_STEPS}\n"
    assert stderr.count("saving a checkpoint") == 1
    assert "SIGUSR1: saving a checkpoint after this step" in stderr
    assert recorded_exits(tmp_path) == []


@pytest.mark.parametrize(
    ("handler", "first_signal"),
    [
        pytest.param("DFL", signal.SIGHUP, id="terminal"),
        pytest.param("IGN", signal.SIGTERM, id="nohup"),
    ],
)
def test_hangup_requests_an_exit_except_under_nohup(
    start_program, handler, first_signal
):
    process = start_program(
        WAIT_FOR_SIGNAL + "print(dog.first_signal)\ndog.stop()",
        before=f"import signal; signal.signal(signal.SIGHUP, signal.SIG_{handler})\n",
    )
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)  # or the kernel may deliver them in another order
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 0, stderr
    assert stdout == f"{first_signal.value}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_exits_although_the_program_sleeps(
    start_program, tmp_path, number
):
    process = start_program(WAIT_FOR_SIGNAL + "sleep_in_c()")
    process.send_signal(number)
    # The first signal is recorded after its patience and a check, and a second one is
    # another request after ``SAME_SIGNAL_S``.
    time.sleep(max(PATIENCE_S + _POLL_S, SAME_SIGNAL_S) + 0.6)
    process.send_signal(number)
    sent_s = time.monotonic()
    _, stderr = process.communicate(timeout=END_TIMEOUT_S)
    # Long before the program wakes up.
    assert time.monotonic() - sent_s < 5
    assert process.returncode == REQUEUE
    assert f"second signal, {number.name}: exited without saving" in stderr
    likely_exit, last_exit = recorded_exits(tmp_path)
    assert likely_exit.step == last_exit.step == FINISHED_STEPS
    assert "killed before the step ended" in likely_exit.reason
    assert likely_exit.is_likely
    assert "second signal" in last_exit.reason
    assert not last_exit.is_likely


def test_hanging_program_is_ended(start_program, tmp_path):
    process = start_program("sleep_in_c()", timeout_s=1.0)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, stdout) == (REQUEUE, "")
    message = rf"no progress for \d+ s after step {FINISHED_STEPS}: this rank hangs"
    assert re.search(message, stderr)
    assert "in sleep_in_c" in (tmp_path / "traceback.txt").read_text()
    (recorded_exit,) = recorded_exits(tmp_path)
    assert "traceback: traceback.txt" in recorded_exit.reason


def test_hanging_program_is_ended_without_a_disk(start_program, tmp_path):
    process = start_program(
        "directory = Path('/proc/nowhere')\n"
        "dog.traceback_file = directory / 'x'\n"
        "sleep_in_c()",
        timeout_s=0.5,
    )
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, stdout) == (REQUEUE, "")
    assert "in sleep_in_c" in stderr
    assert recorded_exits(tmp_path) == []


def test_program_that_blocks_all_threads_is_ended(start_program, tmp_path):
    process = start_program("keep_the_interpreter()", timeout_s=0.5)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, stdout) == (1, "")
    assert "in keep_the_interpreter" in stderr
    assert recorded_exits(tmp_path) == []


def test_program_with_heartbeats_is_not_ended(start_program, tmp_path):
    process = start_program(
        # For longer than the timeout.
        "for step in range(8, 24): time.sleep(0.1); dog.heartbeat(step)\n"
        "dog.stop()\n"
        "print(dog.step)",
        timeout_s=1.0,
    )
    stdout, _ = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, stdout) == (0, "23\n")
    assert recorded_exits(tmp_path) == []


def test_stopped_watchdog_ends_nothing(start_program, tmp_path):
    process = start_program(
        # Without a heartbeat for longer than the timeout and the last resort, 1.2 s.
        "dog.stop()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(1.5)\n"
        "print('end')",
        timeout_s=0.5,
    )
    stdout, _ = process.communicate(timeout=END_TIMEOUT_S)
    assert (process.returncode, stdout) == (0, "end\n")
    assert recorded_exits(tmp_path) == []


def test_suspended_program_does_not_hang(start_program, tmp_path):
    process = start_program(
        # A pause of 1.2 s or more counts as suspended; the last resort never acts.
        "watchdog._SUSPENDED_S = 1.2\n"
        "watchdog._LAST_RESORT_S = 60.0\n"
        # Until the watchdog has postponed its last resort by the new time.
        "time.sleep(0.8)\n"
        "print('set', flush=True)\n"
        "dog.heartbeat()\n"
        "sys.stdin.readline()\n"
        "dog.stop()\n"
        "print('end')",
        timeout_s=1.5,
    )
    assert process.stdout.readline() == "set\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)  # longer than the timeout
    process.send_signal(signal.SIGCONT)
    time.sleep(_POLL_S)  # at least one check of progress
    stdout, stderr = process.communicate("\n", timeout=END_TIMEOUT_S)
    assert (stdout, process.returncode) == ("end\n", 0), stderr
    assert recorded_exits(tmp_path) == []


def test_workers_ignore_signals():
    pid = os.fork()
    if not pid:
        ignore_signals()
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        os._exit(5)
    _, status = os.waitpid(pid, 0)
    # No signal has ended the worker before its exit.
    assert os.waitstatus_to_exitcode(status) == 5
