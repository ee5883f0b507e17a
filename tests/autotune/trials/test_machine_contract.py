"""Promises of every machine, checked on the fake and on the real one.

The real one keeps more of them, with real limits and real processes.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.errors import InternalError
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.messages import Preload
from autotune.trials.multirank import MultirankMachine
from autotune.trials.outcomes import Crashed, Measured, OutOfMemory, TimedOut
from autotune.trials.values import Trial
from testbed.fakes import FakeMachine
from trainer.environment import CPU_ENVIRONMENT

MIB = 2**20
START_TIMEOUT_S = 300
"""Longest start of a command with its server, on a busy machine."""
END_TIMEOUT_S = 60
"""Longest time in which a killed process ends, on a busy machine."""
BUDGET_BYTES = 64 * MIB
BELOW_BUDGET_BYTES = 32 * MIB
BEYOND_BUDGET_BYTES = 128 * MIB
# Outcome of each fault of ``testbed.failing_job``.
OUTCOMES: dict[str, Any] = {
    "none": Measured(figures={"fault": "none"}),
    "allocate": OutOfMemory(detail="can't allocate memory"),
    "crash": Crashed(detail="on purpose"),  # its message mentions memory
    "signal": Crashed(detail="-11"),
    "hang": TimedOut(detail="killed after 1 s"),
}


@pytest.fixture(scope="module")
def real_machine():
    with ForkServerMachine() as machine:
        machine.start()
        yield machine


@pytest.fixture(params=["fake", "real"])
def machine(request, real_machine):
    if request.param == "real":
        return real_machine
    return FakeMachine(lambda trial: OUTCOMES[trial.measured["fault"]])


def trial_with(fault: str, *, allocate_bytes: int = BEYOND_BUDGET_BYTES) -> Trial:
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
    """Wait until these processes have ended, which are no children to wait for."""
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


@pytest.mark.parametrize("fault", OUTCOMES)
def test_every_fault_has_its_outcome(machine, fault):
    expected = OUTCOMES[fault]
    started_s = time.monotonic()
    outcome = machine.run(trial_with(fault))
    assert type(outcome) is type(expected)
    if fault == "none":
        assert outcome == expected
    else:
        assert expected.detail in outcome.detail
    # The time limit of the trial is a second, and a job that hangs takes an hour.
    assert time.monotonic() - started_s < 20


def test_processes_that_a_trial_leaves_are_ended(real_machine, tmp_path):
    pid_file = tmp_path / "pid"
    trial = replace(
        trial_with("leave_child"), local={"pid_file": str(pid_file)}, timeout_s=10
    )
    assert isinstance(real_machine.run(trial), Measured)
    wait_for_end_of([int(pid_file.read_text())])


def test_failures_do_not_affect_later_trials(real_machine):
    for fault in ("signal", "allocate", "crash"):
        real_machine.run(trial_with(fault))
    within_budget = trial_with("allocate", allocate_bytes=BELOW_BUDGET_BYTES)
    assert isinstance(real_machine.run(within_budget), Measured)


def test_trial_after_a_killed_server_starts_another(real_machine):
    os.kill(real_machine._server.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="trial server"):
        real_machine.run(trial_with("none"))
    assert isinstance(real_machine.run(trial_with("none")), Measured)


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


def test_trials_on_a_cpu_wait_as_training_does(real_machine):
    real_machine.run(trial_with("none"))
    server_environment = psutil.Process(real_machine._server.pid).environ()
    expected = {**CPU_ENVIRONMENT, **os.environ}
    assert {name: server_environment[name] for name in CPU_ENVIRONMENT} == {
        name: expected[name] for name in CPU_ENVIRONMENT
    }


OWN_CODE = Preload(module="unused", function="unused", options={})


@pytest.mark.parametrize(
    ("make_machine", "expected"),
    [
        pytest.param(ForkServerMachine, "PASSIVE", id="trainer on a CPU"),
        pytest.param(
            lambda: ForkServerMachine(device="cuda"), None, id="trainer on a GPU"
        ),
        pytest.param(lambda: ForkServerMachine(preload=OWN_CODE), None, id="own code"),
        pytest.param(
            lambda: MultirankMachine(list, "cpu", Path("unused")),
            "PASSIVE",
            id="ranks on a CPU",
        ),
        pytest.param(
            lambda: MultirankMachine(list, "cuda", Path("unused")),
            None,
            id="ranks on GPUs",
        ),
    ],
)
def test_only_the_trainer_on_a_cpu_sets_the_policy(monkeypatch, make_machine, expected):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    machine = make_machine()
    assert machine.environment.get("OMP_WAIT_POLICY") == expected
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert machine.environment["OMP_WAIT_POLICY"] == "ACTIVE"


# Writes the ids of its server and of both ranks, which hang, once there are all three.
COMMAND_WITH_HANGING_TRIAL = """
import psutil, sys, threading, time
from autotune.trials.values import Trial
from autotune.trials.fork_server import ForkServerMachine

def write_pids():
    children = []
    while len(children) < 3:
        time.sleep(0.1)
        children = psutil.Process().children(recursive=True)
    time.sleep(1)  # until the ranks are likely to hang
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


# The trial writes the id of a process that it starts in another session, and hangs.
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
    daemon = wait_for_pids(pid_file)
    kill(command)
    wait_for_end_of(daemon)
