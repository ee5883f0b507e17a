import re

import pytest
import torch
from torch.distributed import DistBackendError, DistStoreError, TCPStore

from trainer.distributed.ranks import is_lost_rank_error
from trainer.failure_notes import publish_failure, read_failure
from trainer.health.failures import explain, out_of_memory

MIB = 2**20
OUTRIGHT = [
    "CUDA out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
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
PERHAPS = [
    f"{library} error: {library.upper()}_STATUS_{status}"
    for library in ("CUBLAS", "cuDNN")
    for status in ("EXECUTION_FAILED", "INTERNAL_ERROR", "NOT_INITIALIZED")
]


def cuda_with(monkeypatch, free_bytes):
    def mem_get_info():
        if free_bytes is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return free_bytes, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        *((RuntimeError(text), text) for text in OUTRIGHT),
        (MemoryError(), "MemoryError"),
        (
            torch.OutOfMemoryError("the allocator had to retry"),
            "the allocator had to retry",
        ),
        (
            RuntimeError(
                "NCCL error in: NCCLUtils.cpp:94\nLast error:\nCuda failure 2 'out of"
                " memory'\nmore"
            ),
            "Cuda failure 2 'out of memory'",
        ),
    ],
)
def test_out_of_memory_is_told_by_the_line_that_says_so(error, line):
    assert out_of_memory(error) == line


@pytest.mark.parametrize("text", PERHAPS)
def test_a_librarys_vague_failure_is_out_of_memory_only_on_a_gpu_that_is_nearly_full(
    text, monkeypatch
):
    assert out_of_memory(RuntimeError(text)) is None  # without CUDA
    for free_bytes, expected in ((511 * MIB, text), (512 * MIB, None), (None, None)):
        cuda_with(monkeypatch, free_bytes)
        assert out_of_memory(RuntimeError(text)) == expected


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
def test_everything_else_is_none_even_on_a_full_gpu(error, monkeypatch):
    cuda_with(monkeypatch, 0)
    assert out_of_memory(error) is None


def nccl(code, last=""):
    return DistBackendError(
        f"NCCL error in: NCCLUtils.cpp:92, text, NCCL version 2.30.7\n{code}\nLast"
        f" error:\n{last}"
    )


@pytest.mark.parametrize(
    ("error", "lost_at_first", "lost_later"),
    [
        (nccl("ncclUnhandledCudaError: Call to CUDA function failed."), False, False),
        (nccl("ncclInternalError: Internal check failed."), False, False),
        (
            nccl(
                "ncclSystemError: System call failed.",
                "Error: failed to extend /dev/shm/nccl-x",
            ),
            False,
            True,
        ),
        (
            nccl(
                "ncclSystemError: System call failed.",
                "Call to recv failed : Connection reset by peer",
            ),
            True,
            True,
        ),
        (
            nccl(
                "ncclInternalError: Internal check failed.",
                "Connection closed by remote peer",
            ),
            True,
            True,
        ),
        (
            nccl("ncclRemoteError: A call failed possibly due to a network error"),
            True,
            True,
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"
                " [127.0.0.1]:3333"
            ),
            True,
            True,
        ),
        (DistStoreError("wait timeout after 60000ms"), True, True),
        (RuntimeError("shapes differ"), False, False),
    ],
)
def test_ranks_are_lost_only_if_an_error_says_so(error, lost_at_first, lost_later):
    assert (is_lost_rank_error(error, rehearsed=False), is_lost_rank_error(error)) == (
        lost_at_first,
        lost_later,
    )


@pytest.mark.parametrize(
    ("error", "lost", "code", "reason", "advice"),
    [
        *(
            (
                RuntimeError(OUTRIGHT[3]),
                lost,
                4,
                rf"out of memory: {re.escape(OUTRIGHT[3])}$",
                "autotune probe",
            )
            for lost in (False, True)
        ),
        (
            nccl("ncclUnhandledCudaError: Call to CUDA function failed."),
            False,
            70,
            r"NCCL failed: .*\(ncclUnhandledCudaError\)$",
            "NCCL_DEBUG=INFO",
        ),
    ],
)
def test_training_that_a_library_ends_has_a_code_a_reason_and_advice(
    error, lost, code, reason, advice
):
    found, said, next_step = explain(error, lost=lost)
    assert found == code
    assert re.match(reason, said, re.DOTALL)
    assert advice in next_step


@pytest.fixture
def torchrun():
    """A store such as torchrun's agent keeps, and what it tells its ranks of it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    del store


def test_word_that_a_rank_left_is_read_by_others_of_the_same_start(torchrun):
    assert read_failure(torchrun) is None
    for word in ((3, "rank 1: no such dataset: “ä”"), (5, "rank 2: no GPU")):
        publish_failure(torchrun, *word)
        assert read_failure(torchrun) == word
    assert read_failure(torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"}) is None
    assert (
        read_failure(
            {key: value for key, value in torchrun.items() if "RESTART" not in key}
        )
        is None
    )


@pytest.mark.parametrize(
    ("key", "value"), [("TORCHELASTIC_USE_AGENT_STORE", "False"), ("MASTER_PORT", "x")]
)
def test_where_no_torchrun_keeps_a_store_nothing_is_left_and_nothing_read(
    torchrun, key, value
):
    for environment in (torchrun | {key: value}, {}):
        publish_failure(environment, 3, "to nobody")
        assert read_failure(environment) is None
    assert read_failure(torchrun) is None
