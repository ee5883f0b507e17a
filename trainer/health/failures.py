"""Classification of errors in training and trials: out of memory, lost ranks or crash, each with a next step."""

import contextlib
import re

import torch

from trainer.errors import (
    HOST_OUT_OF_MEMORY,
    BadConfig,
    DeviceOutOfMemory,
    DiskTrouble,
    RanksLost,
)
from trainer.files import PASSING_ERRORS
from trainer.health.watchdog import REQUEUE

_SMALLER = (
    "lower train.micro_batch_size, or find the largest that fits: autotune probe"
    " --model MODEL --data DIR"
)
_AGAIN = "run the same command again: it resumes from the newest checkpoint"

_REFUSED = re.compile(
    rf"out of memory|{HOST_OUT_OF_MEMORY.pattern}"
    # The caching allocator does not manage handles and workspaces of libraries.
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC"
    # oneDNN reports only this if it lacks memory for its code; for an unknown shape it
    # reports more.
    r"|could not create a memory object|could not (create|execute) a primitive$",
    re.MULTILINE,
)
_PERHAPS = re.compile(
    r"(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)"
)
"""Errors that a lack of memory for a handle or a kernel can cause, but also any other
kind of fault."""
_NCCL_CODE = re.compile(r"nccl[A-Z]\w+Error|ncclInvalidArgument")
_NEARLY_FULL_BYTES = 512 * 2**20


def out_of_memory(error: BaseException) -> str | None:
    """Return the line of an error that reports out of memory.

    None for any other error.
    """
    told = str(error)
    # Only errors of libraries count, as any text may be the name of a file.
    said = _REFUSED.search(told) if isinstance(error, RuntimeError) else None
    if said is None and isinstance(error, RuntimeError) and _is_nearly_full():
        said = _PERHAPS.search(told)
    if said is None and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    start = 0 if said is None else told.rfind("\n", 0, said.start()) + 1
    return told[start:].partition("\n")[0][:300] or type(error).__name__


def is_vague(refusal: str) -> bool:
    """Return whether a line of ``out_of_memory`` may have another cause than memory."""
    return _REFUSED.search(refusal) is None and _PERHAPS.search(refusal) is not None


def explain(error: Exception, *, lost: bool) -> tuple[int, str, str]:
    """Return the exit code, reason and next step for a library's error.

    ``lost``: another rank is unreachable.
    """
    told = str(error)
    if (refusal := out_of_memory(error)) is not None:
        return DeviceOutOfMemory.exit_code, f"out of memory: {refusal}", _SMALLER
    if "NCCL" in told or "CUDA" in told or "Cuda" in told:
        if "invalid usage" in told or "Duplicate GPU" in told:
            reason = f"NCCL initialisation failed: {_first_line(error)}"
            return (
                BadConfig.exit_code,
                reason,
                "start one process per GPU, with one torchrun per node",
            )
        if "ECC" in told:
            reason = f"uncorrectable ECC error of a GPU: {_first_line(error)}"
            return RanksLost.exit_code, reason, f"{_AGAIN}; exclude this node"
    if lost:
        return (
            RanksLost.exit_code,
            f"lost connection to another rank: {_first_line(error)}",
            _AGAIN,
        )
    if (code := _NCCL_CODE.search(told)) is not None:
        reason = f"NCCL failed: {_first_line(error)} ({code[0]})"
        return (
            70,
            reason,
            "run it again with NCCL_DEBUG=INFO to see the call that failed",
        )
    # Killed or crashed; errors in the data are reported otherwise.
    if "DataLoader worker (pid" in told:
        return (
            REQUEUE,
            _first_line(error),
            f"{_AGAIN}; if memory was short, lower train.data.num_workers",
        )
    if isinstance(error, OSError) and error.errno in PASSING_ERRORS:
        return (
            DiskTrouble.exit_code,
            str(error),
            f"{_AGAIN}, once the file system is available",
        )
    if isinstance(error, OSError):
        return BadConfig.exit_code, str(error), "check that disk or file"
    return 70, f"{type(error).__name__}: {error}", "please report this bug"


def _is_nearly_full() -> bool:
    # A fault that ended CUDA in this process is unrelated to memory.
    with contextlib.suppress(RuntimeError):
        return (
            torch.cuda.is_initialized()
            and torch.cuda.mem_get_info()[0] < _NEARLY_FULL_BYTES
        )
    return False


def _first_line(error: Exception) -> str:
    """Return the first sentence of an error, without a prefix for the source location."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", line).partition(". ")[0][:300]
