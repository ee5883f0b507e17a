"""Errors of libraries that ended a training, and how they are explained."""

import os

import pytest
from torch.distributed import DistBackendError

from trainer.formats.errors import DeviceOutOfMemory
from trainer.health.failures import explain

CUBLAS_OUT_OF_MEMORY = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
)


@pytest.mark.parametrize("lost", [False, True])
def test_out_of_memory_is_explained_with_lost_ranks(lost):
    explanation = explain(RuntimeError(CUBLAS_OUT_OF_MEMORY), lost=lost)
    assert explanation.exit_code == DeviceOutOfMemory.exit_code
    assert explanation.reason == f"out of memory: {CUBLAS_OUT_OF_MEMORY}"
    assert "autotune probe" in explanation.next_step


def test_error_of_nccl_is_explained_with_its_code():
    error = DistBackendError(
        "NCCL error in: NCCLUtils.cpp:92, text, NCCL version 2.30.7\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    )
    explanation = explain(error, lost=False)
    assert explanation.exit_code == os.EX_SOFTWARE
    assert explanation.reason.startswith("NCCL failed: ")
    assert explanation.reason.endswith("(ncclUnhandledCudaError)")
    assert "NCCL_DEBUG=INFO" in explanation.next_step
