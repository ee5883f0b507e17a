"""Ends of trials and trainings on a GPU that is full or broken."""

import json

import pytest

from testbed.nullgpu.machine import (
    CUBLAS_ALLOC_FAILED,
    CUBLAS_EXECUTION_FAILED,
    NCCL_REMOTE_ERROR,
    NCCL_SYSTEM_ERROR,
    Faults,
)
from tests.system.faults.jobs import NO_DROPOUT, Workplace
from trainer.formats.errors import RanksLost
from trainer.formats.run_record import read_exit

pytestmark = pytest.mark.cuda
MIB = 2**20
ON_GPUS = NO_DROPOUT | {"train.device": "cuda", "train.compile": False}
FAILED_MATMUL = f"cublasSgemm_v2={CUBLAS_EXECUTION_FAILED}"


def workplace(machine, folder):
    return Workplace(
        folder,
        python=machine.environment.python,
        variables=machine.variables_of_commands(),
    )


@pytest.mark.parametrize(
    ("faults", "memory", "code"),
    [
        # The backward pass has its own handle, which is made when activations are
        # at their highest.
        (f"cublasCreate_v2={CUBLAS_ALLOC_FAILED}@2", None, 4),
        (FAILED_MATMUL, 1000 * MIB, 4),
        (FAILED_MATMUL, None, 70),
    ],
    ids=["no handle", "failed on a full GPU", "failed on an empty GPU"],
)
def test_library_error_is_oom_only_without_memory(
    null_gpu, tmp_path, faults, memory, code
):
    machine = null_gpu(memory=memory, faults=Faults(faults=faults))
    place = workplace(machine, tmp_path)
    run = tmp_path / "run"
    arguments = (place.profile, "--data", place.data, "--out", run)
    settings = [f"--set={key}={json.dumps(value)}" for key, value in ON_GPUS.items()]
    ended = machine.run("-m", "trainer", *arguments, *settings)
    is_out_of_memory = code == 4
    assert ended.code == code, ended
    assert read_exit(run).exit_code == code
    assert ("error: rank 0: out of memory: " in ended.err) == is_out_of_memory, ended
    advises_smaller_batch = "next: lower train.micro_batch_size" in ended.err
    assert advises_smaller_batch == is_out_of_memory, ended


ALLOCATE_IN_BUDGET = """
import torch
from autotune.trials.jobs.budget import CudaBudget
from trainer.runtime.ranks import join_ranks
from tests.trainer.tiny_models import config_of
GB = 10**9
def take(gb): return torch.empty(gb * GB, dtype=torch.uint8, device="cuda")
join_ranks(config_of(device="cuda"))
before = torch.cuda.device_memory_used(0)
torch.cuda.init()
budget = CudaBudget(20 * GB, torch.device("cuda", 0), before)
del (first := [take(8)])[:]
second = take(15)  # 7 of them beside the 8 that are free
budget.check()
print(budget.peak_bytes() // GB)
try:
    take(6)
except torch.OutOfMemoryError:
    print("out of memory")
"""


def test_budget_allows_all_of_its_memory(null_gpu):
    """A new block takes what the allocator has free and the rest of the budget.

    Under ``set_per_process_memory_fraction`` the second block would count as 8 + 15 GB.
    """
    ended = null_gpu().run("-c", ALLOCATE_IN_BUDGET)
    assert ended.out == "15\nout of memory\n", ended


@pytest.mark.soak
def test_run_is_finished_although_a_rank_dies_last(null_gpu, tmp_path):
    machine = null_gpu(devices=2, values=True)
    job = workplace(machine, tmp_path).job(
        2, ON_GPUS | {"train.max_steps": 3, "train.warmup_steps": 1}
    )
    process = job.start([{"kind": "kill", "step": -1, "rank": 1}])
    job.end(process)
    assert process.returncode != 0
    assert machine.counts().total("kernel") > 0
    assert (
        "error: rank 0: after the last step, lost connection to another rank: "
        in job.told()
    )
    end = read_exit(job.directory)
    assert end.exit_code == 0
    assert end.reason == "finished"


@pytest.mark.parametrize(
    ("fault", "code", "requeue", "reason_parts"),
    [
        pytest.param(
            f"ncclCommInitRankConfig={NCCL_SYSTEM_ERROR}",
            70,
            False,
            ("NCCL failed: ", "unhandled system error"),
            marks=pytest.mark.soak,
            id="while ranks meet",
        ),
        pytest.param(
            f"ncclAllReduce={NCCL_REMOTE_ERROR}@30",
            RanksLost.exit_code,
            True,
            ("remote process exited or network",),
            id="in a step",
        ),
    ],
)
def test_nccl_error_ends_all_ranks(
    null_gpu, tmp_path, fault, code, requeue, reason_parts
):
    machine = null_gpu(devices=2, values=True, faults=Faults(faults=fault))
    job = workplace(machine, tmp_path).job(2, ON_GPUS)
    end = job.leave(job.start(), within_s=60)
    assert end.exit_code == code
    # Only a failure in a step can be resumed.
    assert end.requeue == requeue
    assert (end.steps > 0) == requeue
    assert all(part in end.reason for part in reason_parts), end.reason
