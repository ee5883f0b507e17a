import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.health import watchdog
from trainer.health.watchdog import (
    REQUEUE,
    TimeBudget,
    ignore_signals,
    parse_slurm_time_s,
    slurm_left_s,
)

PROGRAM = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
from trainer.health import watchdog
watchdog.PATIENCE_S, watchdog._LAST_RESORT_S, watchdog._REARM_EVERY_S = 0.5, 0.7, 0.1

def record(*leaving):
    with (place / "left.jsonl").open("a") as file:
        file.write(json.dumps(leaving) + "\\n")

def sleep_in_c():
    time.sleep(30)

def keep_the_interpreter():
    ctypes.PyDLL(None).sleep(30)

place = Path(sys.argv[1])
watching = watchdog.Watchdog(timeout_s=float(sys.argv[2]), record=record)
watching.traceback_file = place / "traceback.txt"
watching.start()
watching.heartbeat(7)
print("ready", flush=True)
"""


@pytest.fixture
def process(tmp_path):
    """Starts a program that watches; it has said that it is ready."""
    started = []

    def start(body, timeout_s=60.0, before=""):
        one = subprocess.Popen(
            [sys.executable, "-c", before + PROGRAM + body, tmp_path, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(one)
        assert one.stdout.readline() == "ready\n"
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


def left(tmp_path):
    path = tmp_path / "left.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_signals_that_come_within_a_second_are_one_request_that_is_noted_and_the_program_goes_on(
    process, tmp_path
):
    one = process(
        "time.sleep(0.7)\nprint(watching.first_signal,"
        " watching.step)\nwatching.stop()\nsys.exit(9)"
    )
    one.send_signal(signal.SIGUSR1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        time.sleep(0.1)
        one.send_signal(number)
    out, err = one.communicate(timeout=20)
    assert (out, one.returncode) == (f"{signal.SIGUSR1.value} 7\n", 9)
    assert err.count("saving a checkpoint") == 1
    assert "SIGUSR1: saving a checkpoint after this step" in err
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("handler", "heard"),
    [("DFL", "SIGHUP"), ("IGN", "SIGTERM")],
    ids=["terminal", "nohup"],
)
def test_a_terminal_that_goes_asks_to_leave_but_not_under_nohup(
    process, handler, heard
):
    one = process(
        "while watching.first_signal is None:"
        " time.sleep(0.01)\nprint(watching.first_signal)\nwatching.stop()",
        before=f"import signal; signal.signal(signal.SIGHUP, signal.SIG_{handler})\n",
    )
    one.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    one.send_signal(signal.SIGTERM)
    assert one.communicate(timeout=20)[0] == f"{signal.Signals[heard].value}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once_though_the_main_thread_sleeps_in_c(
    process, tmp_path, number
):
    one = process("while watching.first_signal is None: time.sleep(0.01)\nsleep_in_c()")
    one.send_signal(number)
    time.sleep(1.6)
    one.send_signal(number)
    sent_s = time.monotonic()
    _, err = one.communicate(timeout=20)
    assert time.monotonic() - sent_s < 5
    assert one.returncode == REQUEUE
    assert f"second signal, {number.name}: exited without saving" in err
    perhaps, last = left(tmp_path)
    assert "killed before the step ended" in perhaps
    assert perhaps.endswith("7, true]")
    assert "second signal" in last
    assert last.endswith("7, false]")


ENDS = {
    "hangs": (
        "sleep_in_c()",
        1.0,
        REQUEUE,
        "",
        "no progress for 1 s after step 7: this rank hangs or waits",
    ),
    "hangs, and no disk takes a record": (
        (
            "place = Path('/proc/nowhere')\nwatching.traceback_file = place /"
            " 'x'\nsleep_in_c()"
        ),
        0.5,
        REQUEUE,
        "",
        "in sleep_in_c",
    ),
    "lets no other thread run": (
        "keep_the_interpreter()",
        0.5,
        1,
        "",
        "in keep_the_interpreter",
    ),
    "shows signs of life": (
        (
            "for step in range(8, 24): time.sleep(0.1);"
            " watching.heartbeat(step)\nwatching.stop()\nprint(watching.step)"
        ),
        1.0,
        0,
        "23\n",
        "",
    ),
    "takes long after it stopped watching": (
        (
            "watching.stop()\nos.kill(os.getpid(),"
            " signal.SIGTERM)\ntime.sleep(2)\nprint('end')"
        ),
        0.5,
        0,
        "end\n",
        "",
    ),
}


@pytest.mark.parametrize(
    ("body", "timeout_s", "code", "said", "told"), ENDS.values(), ids=list(ENDS)
)
def test_a_program_is_ended_if_and_only_if_it_hangs(
    process, tmp_path, body, timeout_s, code, said, told
):
    one = process(body, timeout_s=timeout_s)
    out, err = one.communicate(timeout=20)
    assert (one.returncode, out) == (code, said)
    assert told in err
    if code == REQUEUE and "nowhere" not in body:
        assert "in sleep_in_c" in (tmp_path / "traceback.txt").read_text()
        assert "traceback: traceback.txt" in left(tmp_path)[0]
    else:
        assert left(tmp_path) == []


def test_a_program_that_was_suspended_for_longer_than_it_may_stand_still_does_not_hang(
    process, tmp_path
):
    one = process(
        "watchdog._STOPPED_S, watchdog._LAST_RESORT_S = 1.2,"
        " 60.0\ntime.sleep(0.8)\nprint('set', flush=True)\n"
        "watching.heartbeat()\nsys.stdin.readline()\nwatching.stop()\nprint('end')",
        timeout_s=1.5,
    )
    assert one.stdout.readline() == "set\n"
    one.send_signal(signal.SIGSTOP)
    for _ in range(5):
        time.sleep(0.5)
    one.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    out, err = one.communicate("\n", timeout=20)
    assert (out, one.returncode) == ("end\n", 0), err
    assert left(tmp_path) == []


def test_loader_processes_leave_signals_to_the_training():
    pid = os.fork()
    if not pid:
        ignore_signals()
        for number in watchdog.SIGNALS:
            os.kill(os.getpid(), number)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


@pytest.fixture
def now(monkeypatch):
    """Both clocks, standing until they are moved."""
    moment = [500.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    monkeypatch.setattr(time, "time", lambda: moment[0] + 1e9)
    return moment


@pytest.mark.parametrize(
    ("stop_after_s", "slurm_left_s", "left_s"),
    [
        (100.0, None, 50),
        (None, 30.0, 30),
        (100.0, 30.0, 30),
        (70.0, 30.0, 20),
        (None, None, math.inf),
    ],
)
def test_a_budget_is_over_when_saving_and_leaving_would_be_late_for_the_nearer_end(
    now, stop_after_s, slurm_left_s, left_s
):
    budget = TimeBudget(stop_after_s, 450.0, slurm_left_s)  # the process began 50 s ago
    now[0] += min(left_s, 1e12) - 17.1
    # One and a half saves, and 2 s to leave.
    assert not budget.is_over(save_s=10.0, evaluation_due=False)
    now[0] += 0.2
    assert budget.is_over(save_s=10.0, evaluation_due=False) == (left_s < math.inf)


def test_the_slowest_of_the_recent_steps_and_an_evaluation_that_is_due_are_reserved(
    now,
):
    budget = TimeBudget(100.0, 450.0)
    # Four times, for those whose numbers are late.
    budget.step_s.extend([9.0, *[1.0] * 19])
    budget.evaluation_s = 5.0

    def over_in(seconds):
        now[0] += seconds
        return [budget.is_over(save_s=0.0, evaluation_due=due) for due in (False, True)]

    assert over_in(50 - 38 - 0.1) == [False, True]
    budget.step_s.append(1.0)  # the slow one is long ago
    assert [over_in(27), over_in(3)] == [[False, False], [False, True]]


def test_slurm_tells_the_end_of_a_job_in_the_environment_and_older_versions_are_asked(
    now, monkeypatch
):
    run = Mock(side_effect=[SimpleNamespace(stdout="  1:30\n"), OSError])
    monkeypatch.setattr(watchdog.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(watchdog.subprocess, "run", run)
    assert [
        slurm_left_s({"SLURM_JOB_END_TIME": end}) for end in ("1000000560.0", "soon")
    ] == [60, None]
    assert [slurm_left_s({"SLURM_JOB_ID": job}) for job in ("17", "17; rm", "17")] == [
        90,
        None,
        None,
    ]
    assert "17" in run.call_args_list[0].args[0]
    assert (slurm_left_s({}), run.call_count) == (None, 2)


@given(st.integers(1, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_slurms_times_are_understood_with_and_without_days_and_hours_and_words_for_none(
    days, hours, minutes, seconds
):
    texts = [
        f"{seconds:02}",
        f"{minutes}:{seconds:02}",
        f"{hours}:{minutes:02}:{seconds:02}",
    ]
    texts.append(f"{days}-{hours:02}:{minutes:02}:{seconds:02}")
    expected = [seconds, 60 * minutes, 3600 * hours, 86400 * days]
    assert [parse_slurm_time_s(text) for text in texts] == [
        sum(expected[: count + 1]) for count in range(4)
    ]
    words = ["UNLIMITED", "NOT_SET", "INVALID", "", "1-", "1:2:3:4", "-5"]
    assert [parse_slurm_time_s(text) for text in words] == [None] * 7
