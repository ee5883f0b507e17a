"""Every machine keeps the same promises; the real one keeps more of them, with real
limits and real processes."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.values import Crashed, Measured, OutOfMemory, TimedOut, Trial
from testbed.fakes import FakeMachine

OUTCOMES: dict[str, Any] = {
    "none": Measured(figures={"fault": "none"}),
    "allocate": OutOfMemory(detail="can't allocate memory"),
    "crash": Crashed(detail="on purpose"),  # its message mentions memory
    "signal": Crashed(detail="-11"),
    "hang": TimedOut(detail="killed after 1 s"),
}


@pytest.fixture(scope="module")
def forking():
    with ForkServerMachine() as machine:
        machine.start()
        yield machine


@pytest.fixture(params=["fake", "real"])
def machine(request, forking):
    return (
        FakeMachine(lambda trial: OUTCOMES[trial.measured["fault"]])
        if request.param == "fake"
        else forking
    )


def _fault(fault: str, **measured) -> Trial:
    limits = {"budget_bytes": 64 * 2**20, "allocate_bytes": 128 * 2**20}
    return Trial(
        job="testbed.failing_job",
        measured={"fault": fault} | limits | measured,
        timeout_s=1.0,
    )


def wait_for_end_of(pids, within_s):
    deadline_s = time.monotonic() + within_s
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("fault", OUTCOMES)
def test_a_job_ends_in_time_as_what_became_of_it(machine, fault):
    started_s, expected = time.monotonic(), OUTCOMES[fault]
    outcome = machine.run(_fault(fault))
    assert type(outcome) is type(expected)
    assert outcome == expected if fault == "none" else expected.detail in outcome.detail
    assert time.monotonic() - started_s < 20  # a job that hangs would take an hour


def test_processes_that_a_trial_leaves_are_ended_with_it(forking, tmp_path):
    trial = replace(
        _fault("leave_child"), local={"pid_file": str(tmp_path / "pid")}, timeout_s=10
    )
    assert isinstance(forking.run(trial), Measured)
    wait_for_end_of([int((tmp_path / "pid").read_text())], 5)


def test_trials_after_a_failure_are_not_affected_by_it_and_an_allocation_within_the_budget_goes_through(
    forking,
):
    for fault in ("signal", "allocate", "crash"):
        forking.run(_fault(fault))
    assert isinstance(
        forking.run(_fault("allocate", allocate_bytes=32 * 2**20)), Measured
    )


def test_a_server_that_was_killed_is_an_error_and_the_next_trial_has_a_new_one(forking):
    os.kill(forking._server.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="trial server"):
        forking.run(_fault("none"))
    assert isinstance(forking.run(_fault("none")), Measured)


def test_a_killed_command_leaves_no_trial_behind(tmp_path):
    pid_file = tmp_path / "pids"
    code = f"""
import psutil, threading, time
from autotune.trials.values import Trial
from autotune.trials.fork_server import ForkServerMachine
machine = ForkServerMachine()
machine.start()
def write():
    time.sleep(1)
    open({str(pid_file)!r}, "w").write(" ".join(str(p.pid) for p in psutil.Process().children(recursive=True)))
threading.Thread(target=write).start()
machine.run(Trial(job="testbed.failing_job", measured={{"fault": "hang", "local_ranks": 2}}, timeout_s=600))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline_s = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 3  # the server and two ranks
    process.kill()
    process.wait()
    wait_for_end_of(pids, 60)
