"""Classification of errors in training and trials, each with a next step.

An error is out of memory, the loss of other ranks, a failure of a disk, or a crash.
"""

import contextlib
import os
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

_LOWER_BATCH_SIZE = (
    "lower train.micro_batch_size, or find the largest that fits: autotune probe"
    " --model MODEL --data DIR"
)
_RUN_AGAIN = "run the same command again: it resumes from the newest checkpoint"

_OUT_OF_MEMORY = re.compile(
    rf"out of memory|{HOST_OUT_OF_MEMORY.pattern}"
    # The caching allocator does not manage handles and workspaces of libraries.
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_\w*ALLOC"
    # oneDNN reports only this if it lacks memory for its code; for an unknown shape it
    # reports more.
    r"|could not create a memory object|could not (create|execute) a primitive$",
    re.MULTILINE,
)
_PERHAPS_OUT_OF_MEMORY = re.compile(
    r"(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)"
)
"""Errors that a lack of memory for a handle or a kernel can cause, but also any other
kind of fault."""
_NCCL_CODE = re.compile(r"nccl[A-Z]\w+Error|ncclInvalidArgument")
_NEARLY_FULL_BYTES = 512 * 2**20
"""Free GPU memory below which a vague error is taken for out of memory."""
_MAX_REASON_LENGTH = 300


def out_of_memory(error: BaseException) -> str | None:
    """Return the line of an error that reports out of memory.

    None for any other error.
    """
    text = str(error)
    match = None
    # Only errors of libraries count, as any text may be the name of a file.
    if isinstance(error, RuntimeError):
        match = _OUT_OF_MEMORY.search(text)
        if match is None and _is_nearly_full():
            match = _PERHAPS_OUT_OF_MEMORY.search(text)
    if match is None and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    line_start = 0
    if match is not None:
        line_start = text.rfind("\n", 0, match.start()) + 1
    line, _, _ = text[line_start:].partition("\n")
    return line[:_MAX_REASON_LENGTH] or type(error).__name__


def is_vague(line: str) -> bool:
    """Return whether a line of ``out_of_memory`` may have another cause than memory."""
    return (
        _OUT_OF_MEMORY.search(line) is None
        and _PERHAPS_OUT_OF_MEMORY.search(line) is not None
    )


def explain(error: Exception, *, lost: bool) -> tuple[int, str, str]:
    """Return the exit code, reason and next step for a library's error.

    ``lost``: another rank is unreachable.
    """
    text = str(error)
    memory_line = out_of_memory(error)
    if memory_line is not None:
        reason = f"out of memory: {memory_line}"
        return DeviceOutOfMemory.exit_code, reason, _LOWER_BATCH_SIZE
    if "NCCL" in text or "CUDA" in text or "Cuda" in text:
        if "invalid usage" in text or "Duplicate GPU" in text:
            reason = f"NCCL initialisation failed: {_first_sentence(error)}"
            next_step = "start one process per GPU, with one torchrun per node"
            return BadConfig.exit_code, reason, next_step
        if "ECC" in text:
            reason = f"uncorrectable ECC error of a GPU: {_first_sentence(error)}"
            return RanksLost.exit_code, reason, f"{_RUN_AGAIN}; exclude this node"
    if lost:
        reason = f"lost connection to another rank: {_first_sentence(error)}"
        return RanksLost.exit_code, reason, _RUN_AGAIN
    nccl_code = _NCCL_CODE.search(text)
    if nccl_code is not None:
        reason = f"NCCL failed: {_first_sentence(error)} ({nccl_code[0]})"
        next_step = "run it again with NCCL_DEBUG=INFO to see the call that failed"
        return os.EX_SOFTWARE, reason, next_step
    # Killed or crashed; errors in the data are reported otherwise.
    if "DataLoader worker (pid" in text:
        next_step = f"{_RUN_AGAIN}; if memory was short, lower train.data.num_workers"
        return REQUEUE, _first_sentence(error), next_step
    if isinstance(error, OSError):
        if error.errno in PASSING_ERRORS:
            next_step = f"{_RUN_AGAIN}, once the file system is available"
            return DiskTrouble.exit_code, text, next_step
        return BadConfig.exit_code, text, "check that disk or file"
    reason = f"{type(error).__name__}: {error}"
    return os.EX_SOFTWARE, reason, "please report this bug"


def _is_nearly_full() -> bool:
    # A fault that ended CUDA in this process is unrelated to memory.
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_initialized():
            free_bytes, _ = torch.cuda.mem_get_info()
            return free_bytes < _NEARLY_FULL_BYTES
    return False


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, without the place in the source."""
    first_line, _, _ = str(error).strip().partition("\n")
    without_place = re.sub(r"^\[[^\]]*\]\s*", "", first_line)
    sentence, _, _ = without_place.partition(". ")
    return sentence[:_MAX_REASON_LENGTH]
