import re

import pytest
import torch
from torch.distributed import DistBackendError, DistStoreError, TCPStore

from trainer.distributed.ranks import is_lost_rank_error
from trainer.failure_notes import publish_failure, read_failure
from trainer.health.failures import explain, out_of_memory

MIB = 2**20
CLEAR_MESSAGES = [
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
VAGUE_MESSAGES = [
    f"{library} error: {library.upper()}_STATUS_{status}"
    for library in ("CUBLAS", "cuDNN")
    for status in ("EXECUTION_FAILED", "INTERNAL_ERROR", "NOT_INITIALIZED")
]


def pretend_cuda(monkeypatch, free_bytes):
    """Pretend a GPU with so much free memory; None if CUDA has ended."""

    def mem_get_info():
        if free_bytes is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return free_bytes, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        *((RuntimeError(message), message) for message in CLEAR_MESSAGES),
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
def test_out_of_memory_is_recognised_by_its_line(error, line):
    assert out_of_memory(error) == line


@pytest.mark.parametrize("message", VAGUE_MESSAGES)
def test_vague_error_without_cuda_is_another_fault(message):
    assert out_of_memory(RuntimeError(message)) is None


@pytest.mark.parametrize("message", VAGUE_MESSAGES)
@pytest.mark.parametrize(
    ("free_bytes", "is_out_of_memory"),
    [
        pytest.param(511 * MIB, True, id="nearly full"),
        pytest.param(512 * MIB, False, id="not full"),
        pytest.param(None, False, id="CUDA has ended"),
    ],
)
def test_vague_error_on_a_full_gpu_is_out_of_memory(
    message, free_bytes, is_out_of_memory, monkeypatch
):
    pretend_cuda(monkeypatch, free_bytes)
    line = out_of_memory(RuntimeError(message))
    assert line == (message if is_out_of_memory else None)


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
    pretend_cuda(monkeypatch, 0)
    assert out_of_memory(error) is None


def nccl_error(code, last_error=""):
    return DistBackendError(
        f"NCCL error in: NCCLUtils.cpp:92, text, NCCL version 2.30.7\n{code}\nLast"
        f" error:\n{last_error}"
    )


@pytest.mark.parametrize(
    ("error", "lost_before_rehearsal", "lost_later"),
    [
        pytest.param(
            nccl_error("ncclUnhandledCudaError: Call to CUDA function failed."),
            False,
            False,
            id="fault of this GPU",
        ),
        pytest.param(
            nccl_error("ncclInternalError: Internal check failed."),
            False,
            False,
            id="fault of NCCL",
        ),
        pytest.param(
            nccl_error(
                "ncclSystemError: System call failed.",
                "Error: failed to extend /dev/shm/nccl-x",
            ),
            False,
            True,
            id="too little shared memory",
        ),
        pytest.param(
            nccl_error(
                "ncclSystemError: System call failed.",
                "Call to recv failed : Connection reset by peer",
            ),
            True,
            True,
            id="connection reset",
        ),
        pytest.param(
            nccl_error(
                "ncclInternalError: Internal check failed.",
                "Connection closed by remote peer",
            ),
            True,
            True,
            id="connection closed",
        ),
        pytest.param(
            nccl_error(
                "ncclRemoteError: A call failed possibly due to a network error"
            ),
            True,
            True,
            id="network error",
        ),
        pytest.param(
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"
                " [127.0.0.1]:3333"
            ),
            True,
            True,
            id="gloo",
        ),
        pytest.param(
            DistStoreError("wait timeout after 60000ms"), True, True, id="store"
        ),
        pytest.param(RuntimeError("shapes differ"), False, False, id="other error"),
    ],
)
def test_lost_ranks_are_recognised(error, lost_before_rehearsal, lost_later):
    assert is_lost_rank_error(error, rehearsed=False) == lost_before_rehearsal
    assert is_lost_rank_error(error) == lost_later


CUBLAS_OUT_OF_MEMORY = CLEAR_MESSAGES[3]


@pytest.mark.parametrize(
    ("error", "lost", "exit_code", "reason", "advice"),
    [
        *(
            pytest.param(
                RuntimeError(CUBLAS_OUT_OF_MEMORY),
                lost,
                4,
                rf"out of memory: {re.escape(CUBLAS_OUT_OF_MEMORY)}$",
                "autotune probe",
                id=f"out of memory, lost={lost}",
            )
            for lost in (False, True)
        ),
        pytest.param(
            nccl_error("ncclUnhandledCudaError: Call to CUDA function failed."),
            False,
            70,
            r"NCCL failed: .*\(ncclUnhandledCudaError\)$",
            "NCCL_DEBUG=INFO",
            id="NCCL",
        ),
    ],
)
def test_error_of_a_library_is_explained(error, lost, exit_code, reason, advice):
    explained_exit_code, explained_reason, next_step = explain(error, lost=lost)
    assert explained_exit_code == exit_code
    assert re.match(reason, explained_reason, re.DOTALL)
    assert advice in next_step


@pytest.fixture
def torchrun():
    """A store such as torchrun's agent has, as environment variables for its ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    del store


def test_failure_note_is_read_by_other_ranks(torchrun):
    assert read_failure(torchrun) is None
    for note in ((3, "rank 1: no such dataset: “ä”"), (5, "rank 2: no GPU")):
        publish_failure(torchrun, *note)
        assert read_failure(torchrun) == note


def test_failure_note_is_not_read_by_other_starts(torchrun):
    publish_failure(torchrun, 5, "rank 2: no GPU")
    assert read_failure(torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"}) is None
    del torchrun["TORCHELASTIC_RESTART_COUNT"]
    assert read_failure(torchrun) is None


@pytest.mark.parametrize(
    ("key", "value"), [("TORCHELASTIC_USE_AGENT_STORE", "False"), ("MASTER_PORT", "x")]
)
def test_no_failure_note_without_a_store(torchrun, key, value):
    for environment in (torchrun | {key: value}, {}):
        publish_failure(environment, 3, "for nobody")
        assert read_failure(environment) is None
    assert read_failure(torchrun) is None
