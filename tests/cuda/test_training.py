"""The trainer under torchrun on pretended GPUs, with values: it comes to what it comes to on a CPU, whatever happens."""

import pytest

from tests.nullgpu.machine import NCCL_REMOTE_ERROR, Faults
from tests.system.faults.interruptions import kill_rank, signal_rank
from tests.system.faults.jobs import NO_DROPOUT, STEPS, Workplace
from tests.system.faults.moves import MOVED, Stage, move
from tests.system.faults.sick import leave_out, roll_back
from tests.system.faults.train import PRESSED, interrupt

pytestmark = pytest.mark.cuda
SETTINGS = NO_DROPOUT | {"train.precision": "fp32"}


@pytest.fixture(scope="module")
def place(null_gpus, tmp_path_factory) -> Workplace:
    machine = null_gpus(devices=2, values=True)
    return Workplace(
        tmp_path_factory.mktemp("trainings"),
        python=machine.environment.python,
        variables=machine.variables_of_commands(),
        settings=SETTINGS,
    )


def test_two_gpus_train_as_two_cpus_do(place, tmp_path):
    on_gpus = place.undisturbed(2, MOVED).record()
    on_cpus = Workplace(tmp_path, settings=SETTINGS).undisturbed(2, MOVED).record()
    assert on_gpus.header.device == "NVIDIA H100 NVL"
    assert [row.loss for row in on_gpus.steps] == pytest.approx([row.loss for row in on_cpus.steps], rel=1e-4)
    assert [row.grad_norm for row in on_gpus.steps] == pytest.approx([row.grad_norm for row in on_cpus.steps], rel=1e-3)
    assert len(on_gpus.evaluations) == len(on_cpus.evaluations) == 1 + STEPS // 10
    for found, expected in zip(on_gpus.evaluations, on_cpus.evaluations, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-4)
