"""Errors of libraries: which report a lack of memory."""

import pytest
import torch

from trainer.runtime.out_of_memory import out_of_memory

NEARLY_FULL_BYTES = 512 * 2**20
"""Free memory below which a vague error on a GPU is taken for out of memory."""
CUBLAS_OUT_OF_MEMORY = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
)
CLEAR_MESSAGES = [
    "CUDA out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    CUBLAS_OUT_OF_MEMORY,
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Cuda failure 2 'out of memory'",
    (
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate"
        " memory: you tried to allocate 8 bytes."
    ),
    "std::bad_alloc",
    "could not create a memory object",
    "could not create a primitive",
]
"""Messages that occur only if memory is short."""
VAGUE_MESSAGES = [
    f"{library} error: {library.upper()}_STATUS_{status}"
    for library in ("CUBLAS", "cuDNN")
    for status in ("EXECUTION_FAILED", "INTERNAL_ERROR", "NOT_INITIALIZED")
]
"""Messages that may also have another cause."""


def pretend_gpu(monkeypatch, *, free_bytes):
    """Pretend a GPU with so much free memory; None if CUDA has ended."""

    def mem_get_info():
        if free_bytes is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        total_bytes = 80 * 2**30
        return free_bytes, total_bytes

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.parametrize("message", CLEAR_MESSAGES)
def test_out_of_memory_is_recognised_by_its_message(message):
    assert out_of_memory(RuntimeError(message)) == message


@pytest.mark.parametrize(
    ("error", "line"),
    [
        pytest.param(MemoryError(), "MemoryError", id="Python"),
        pytest.param(
            torch.OutOfMemoryError("the allocator had to retry"),
            "the allocator had to retry",
            id="torch",
        ),
    ],
)
def test_out_of_memory_is_recognised_by_its_type(error, line):
    assert out_of_memory(error) == line


def test_only_the_line_about_memory_is_returned():
    error = RuntimeError(
        "NCCL error in: NCCLUtils.cpp:94\nLast error:\nCuda failure 2 'out of"
        " memory'\nmore"
    )
    assert out_of_memory(error) == "Cuda failure 2 'out of memory'"


@pytest.mark.parametrize("message", VAGUE_MESSAGES)
def test_vague_error_without_cuda_is_another_fault(message):
    assert out_of_memory(RuntimeError(message)) is None


@pytest.mark.parametrize("message", VAGUE_MESSAGES)
@pytest.mark.parametrize(
    ("free_bytes", "is_out_of_memory"),
    [
        pytest.param(NEARLY_FULL_BYTES - 1, True, id="nearly full"),
        pytest.param(NEARLY_FULL_BYTES, False, id="not full"),
        pytest.param(None, False, id="CUDA has ended"),
    ],
)
def test_vague_error_is_judged_by_free_memory(
    message, free_bytes, is_out_of_memory, monkeypatch
):
    pretend_gpu(monkeypatch, free_bytes=free_bytes)
    expected_line = message if is_out_of_memory else None
    assert out_of_memory(RuntimeError(message)) == expected_line


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive descriptor for an inner product"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"
        ),
        FileNotFoundError("notes about out of memory.txt"),
        ValueError("shapes differ"),
    ],
    ids=str,
)
def test_other_errors_are_not_out_of_memory(error, monkeypatch):
    pretend_gpu(monkeypatch, free_bytes=0)
    assert out_of_memory(error) is None
