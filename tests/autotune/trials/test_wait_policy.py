"""The policy by which idle threads of a trial wait, ``OMP_WAIT_POLICY``.

On a CPU it is the trainer's own, so that trials are as fast as training is.
"""

import os
from pathlib import Path

import psutil
import pytest

from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.messages import Preload
from autotune.trials.multirank import MultirankMachine
from trainer.formats.cpu_environment import CPU_ENVIRONMENT

OWN_CODE = Preload(module="unused", function="unused", options={})


def policy_of(machine):
    return machine.environment.get("OMP_WAIT_POLICY")


def test_trials_on_a_cpu_wait_as_training_does(started_server):
    server_environment = psutil.Process(started_server._server.pid).environ()
    expected = {**CPU_ENVIRONMENT, **os.environ}
    assert {name: server_environment[name] for name in CPU_ENVIRONMENT} == {
        name: expected[name] for name in CPU_ENVIRONMENT
    }


@pytest.fixture(
    params=[
        pytest.param(ForkServerMachine, id="trials"),
        pytest.param(
            lambda: MultirankMachine(list, "cpu", Path("unused")), id="trials of ranks"
        ),
    ]
)
def machine_on_cpu(request):
    return request.param()


@pytest.fixture(
    params=[
        pytest.param(lambda: ForkServerMachine(device="cuda"), id="trials on a GPU"),
        pytest.param(
            lambda: MultirankMachine(list, "cuda", Path("unused")), id="ranks on GPUs"
        ),
        pytest.param(lambda: ForkServerMachine(preload=OWN_CODE), id="your own code"),
    ]
)
def other_machine(request):
    return request.param()


def test_trainer_on_a_cpu_waits_passively(monkeypatch, machine_on_cpu):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert policy_of(machine_on_cpu) == "PASSIVE"


def test_other_trials_have_no_policy(monkeypatch, other_machine):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert policy_of(other_machine) is None


def test_policy_that_you_set_stays(monkeypatch, machine_on_cpu):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert policy_of(machine_on_cpu) == "ACTIVE"


def test_policy_that_you_set_reaches_others(monkeypatch, other_machine):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert policy_of(other_machine) == "ACTIVE"
