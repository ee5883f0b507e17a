"""Errors and figures of a GPU near its limits, and of one that is not what it seems."""

import pytest

from tests.nullgpu.machine import CUBLAS_NOT_INITIALIZED, Faults

pytestmark = pytest.mark.cuda
GIB = 2**30

NO_HANDLE = """
import torch
from trainer.failure import out_of_memory
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(int(free * {share}), dtype=torch.uint8, device="cuda")
x = torch.ones(64, 64, device="cuda")
try:
    x @ x
except RuntimeError as error:
    print("NOT_INITIALIZED" in str(error), out_of_memory(error) is not None)
"""


@pytest.mark.parametrize(("share", "expected"), [(0.1, "True False\n"), (0.999, "True True\n")], ids=["empty", "full"])
def test_a_handle_that_cannot_be_made_is_out_of_memory_only_on_a_full_gpu(null_gpu, share, expected):
    machine = null_gpu(memory=20 * GIB, faults=Faults(faults=f"cublasCreate_v2={CUBLAS_NOT_INITIALIZED}"))
    ended = machine.run("-c", NO_HANDLE.format(share=share))
    assert ended.out == expected, ended
