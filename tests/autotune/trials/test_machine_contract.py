"""Promises of every machine that runs trials, checked on the fake and on the real one.

The real one also ends all processes of a trial, and of a server that is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from autotune.errors import InternalError
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.outcomes import Crashed, Measured, OutOfMemory, TimedOut
from autotune.trials.values import Trial
from testbed.fakes import FakeMachine

MIB = 2**20
START_TIMEOUT_S = 300
"""Longest start of a command with its server, on a busy machine."""
END_TIMEOUT_S = 60
"""Longest time in which a killed process ends, on a busy machine."""
BUDGET_BYTES = 64 * MIB
BELOW_BUDGET_BYTES = 32 * MIB
BEYOND_BUDGET_BYTES = 128 * MIB
FAILURES: dict[str, Any] = {
    "allocate": OutOfMemory(detail="can't allocate memory"),
    # Its message also contains "out of memory".
    "crash": Crashed(detail="on purpose"),
    "signal": Crashed(detail="-11"),
    "hang": TimedOut(detail="killed after 1 s"),
}
"""Outcome of each fault of ``testbed.failing_job``, with a part of its detail."""
NO_FAILURE = Measured(figures={"fault": "none"})


@pytest.fixture(params=["fake", "real"])
def machine(request, started_server):
    if request.param == "real":
        return started_server
    outcomes = FAILURES | {"none": NO_FAILURE}
    return FakeMachine(lambda trial: outcomes[trial.measured["fault"]])


def trial_with(fault: str, *, allocate_bytes: int = BEYOND_BUDGET_BYTES) -> Trial:
    """Return a trial with a time limit of a second that has a fault."""
    measured = {
        "fault": fault,
        "budget_bytes": BUDGET_BYTES,
        "allocate_bytes": allocate_bytes,
    }
    return Trial(job="testbed.failing_job", measured=measured, timeout_s=1.0)


def is_running(pid: int) -> bool:
    if not psutil.pid_exists(pid):
        return False
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for_end_of(pids):
    """Wait until these processes, which are no children of this one, have ended."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def wait_for_pids(pid_file) -> list[int]:
    """Return the process ids in a file, once it has been written."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return [int(pid) for pid in pid_file.read_text().split()]


@pytest.fixture
def start_command():
    """Return a function that starts Python source with arguments as a command.

    The command is killed after the test at the latest.
    """
    with contextlib.ExitStack() as stack:

        def start(source, *arguments):
            command = subprocess.Popen([sys.executable, "-c", source, *arguments])
            stack.callback(kill, command)
            return command

        yield start


def kill(command):
    command.kill()
    command.wait()


def test_trial_without_a_fault_has_figures(machine):
    assert machine.run(trial_with("none")) == NO_FAILURE


@pytest.mark.parametrize("fault", FAILURES)
def test_every_fault_has_its_outcome(machine, fault):
    expected = FAILURES[fault]
    started_s = time.monotonic()
    outcome = machine.run(trial_with(fault))
    assert type(outcome) is type(expected)
    assert expected.detail in outcome.detail
    # The job that hangs takes an hour.
    assert time.monotonic() - started_s < 20


def test_processes_that_a_trial_leaves_are_ended(started_server, tmp_path):
    pid_file = tmp_path / "pid"
    trial = replace(
        trial_with("leave_child"), local={"pid_file": str(pid_file)}, timeout_s=10
    )
    assert isinstance(started_server.run(trial), Measured)
    wait_for_end_of([int(pid_file.read_text())])


def test_failures_do_not_affect_later_trials(started_server):
    for fault in ("signal", "allocate", "crash"):
        started_server.run(trial_with(fault))
    within_budget = trial_with("allocate", allocate_bytes=BELOW_BUDGET_BYTES)
    assert isinstance(started_server.run(within_budget), Measured)


def test_trial_after_a_killed_server_starts_another(started_server):
    os.kill(started_server._server.pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="the trial server exited with code -9"):
        started_server.run(trial_with("none"))
    assert isinstance(started_server.run(trial_with("none")), Measured)


def test_interrupt_of_the_start_ends_the_server(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with ForkServerMachine() as machine:
        monkeypatch.setattr(machine, "_read_reply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            machine.start()
        assert machine._server.wait(timeout=10) == -signal.SIGKILL


def test_slow_start_names_its_time_limit():
    with (
        ForkServerMachine(start_timeout_s=0.001) as machine,
        pytest.raises(InternalError, match=r"did not answer within 0\.001 s"),
    ):
        machine.start()


# Once the server and both ranks of a hanging trial exist, writes their process ids.
COMMAND_WITH_HANGING_TRIAL = """
import psutil, sys, threading, time
from autotune.trials.values import Trial
from autotune.trials.fork_server import ForkServerMachine

def write_pids():
    children = []
    while len(children) < 3:
        time.sleep(0.1)
        children = psutil.Process().children(recursive=True)
    time.sleep(0.3)  # by then the ranks are likely to hang
    open(sys.argv[1], "w").write(" ".join(str(child.pid) for child in children))

machine = ForkServerMachine()
machine.start()
threading.Thread(target=write_pids).start()
hanging = {"fault": "hang", "local_ranks": 2}
machine.run(Trial(job="testbed.failing_job", measured=hanging, timeout_s=600))
"""


def test_killed_command_leaves_no_trial(tmp_path, start_command):
    pid_file = tmp_path / "pids"
    command = start_command(COMMAND_WITH_HANGING_TRIAL, str(pid_file))
    pids = wait_for_pids(pid_file)
    assert len(pids) == 3
    kill(command)
    wait_for_end_of(pids)


# The trial starts a process in another session, writes its id, and hangs.
COMMAND_WITH_DAEMON = """
import sys
from autotune.trials.values import Trial
from autotune.trials.fork_server import ForkServerMachine

trial = Trial(
    job="testbed.failing_job",
    measured={"fault": "leave_daemon"},
    local={"pid_file": sys.argv[1]},
    timeout_s=600,
)
ForkServerMachine().run(trial)
"""


def test_killed_command_leaves_no_daemon_of_a_trial(tmp_path, start_command):
    pid_file = tmp_path / "pid"
    command = start_command(COMMAND_WITH_DAEMON, str(pid_file))
    pids = wait_for_pids(pid_file)
    assert len(pids) == 1
    kill(command)
    wait_for_end_of(pids)
