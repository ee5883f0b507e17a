"""Classification of errors in training and trials, each with a next step.

An error is out of memory, the loss of other ranks, a failure of a disk, or a crash.
"""

import contextlib
import os
import re
from dataclasses import dataclass

import torch

from trainer.formats.errors import (
    HOST_OUT_OF_MEMORY,
    BadConfig,
    DeviceOutOfMemory,
    DiskTrouble,
    RanksLost,
)
from trainer.formats.files import PASSING_ERRORS
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
"""NCCL's codes of failures; the one missing, ``ncclInvalidUsage``, is a GPU fault for
``_explain_gpu_fault``."""
_NEARLY_FULL_BYTES = 512 * 2**20
"""Free GPU memory, in bytes, below which a vague error is taken for out of memory."""
_MAX_REASON_LENGTH = 300
"""Longest line that is quoted, in characters; messages of libraries may hold a whole
stack trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of an error that ended training, and of what to do about it."""

    exit_code: int
    """Exit code of the trainer."""
    reason: str
    """Description of the error, for the message and the run record."""
    next_step: str
    """Instructions for you."""


def out_of_memory(error: BaseException) -> str | None:
    """Return the line of an error that reports out of memory.

    Returns:
        The line, or the type of the error if it has no message; None if it is another
        kind of error.
    """
    match = _match_out_of_memory(error)
    if match is None and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    text = str(error)
    line_start = 0
    if match is not None:
        line_start = text.rfind("\n", 0, match.start()) + 1
    line, _, _ = text[line_start:].partition("\n")
    return line[:_MAX_REASON_LENGTH] or type(error).__name__


def _match_out_of_memory(error: BaseException) -> re.Match[str] | None:
    """Return the part of a message that reports out of memory, if any."""
    # Only errors of libraries count, as any text may be the name of a file.
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    match = _OUT_OF_MEMORY.search(text)
    if match is None and _gpu_is_nearly_full():
        match = _PERHAPS_OUT_OF_MEMORY.search(text)
    return match


def _gpu_is_nearly_full() -> bool:
    # A fault that ended CUDA in this process is unrelated to memory.
    with contextlib.suppress(RuntimeError):
        if torch.cuda.is_initialized():
            free_bytes, _ = torch.cuda.mem_get_info()
            return free_bytes < _NEARLY_FULL_BYTES
    return False


def is_vague(line: str) -> bool:
    """Return whether a line of ``out_of_memory`` may have another cause than memory."""
    return (
        _OUT_OF_MEMORY.search(line) is None
        and _PERHAPS_OUT_OF_MEMORY.search(line) is not None
    )


def explain(error: Exception, *, lost: bool) -> Explanation:
    """Explain an error of a library.

    The first explanation that applies is returned. Those of this rank come before a
    lost connection, which is often only a consequence of them.

    Args:
        error: Error that ended training.
        lost: Whether another rank is unreachable.
    """
    memory_line = out_of_memory(error)
    if memory_line is not None:
        return Explanation(
            exit_code=DeviceOutOfMemory.exit_code,
            reason=f"out of memory: {memory_line}",
            next_step=_LOWER_BATCH_SIZE,
        )
    gpu_fault = _explain_gpu_fault(error)
    if gpu_fault is not None:
        return gpu_fault
    if lost:
        return Explanation(
            exit_code=RanksLost.exit_code,
            reason=f"lost connection to another rank: {_first_sentence(error)}",
            next_step=_RUN_AGAIN,
        )
    nccl_code = _NCCL_CODE.search(str(error))
    if nccl_code is not None:
        return Explanation(
            exit_code=os.EX_SOFTWARE,
            reason=f"NCCL failed: {_first_sentence(error)} ({nccl_code[0]})",
            next_step="run it again with NCCL_DEBUG=INFO to see the call that failed",
        )
    # A worker was killed or crashed; errors in the data are reported otherwise.
    if "DataLoader worker (pid" in str(error):
        return Explanation(
            exit_code=REQUEUE,
            reason=_first_sentence(error),
            next_step=(
                f"{_RUN_AGAIN}; if memory was short, lower train.data.num_workers"
            ),
        )
    if isinstance(error, OSError):
        return _explain_file_error(error)
    return Explanation(
        exit_code=os.EX_SOFTWARE,
        reason=f"{type(error).__name__}: {error}",
        next_step="please report this bug",
    )


def _explain_gpu_fault(error: Exception) -> Explanation | None:
    """Explain a GPU that several ranks share, or that is defective."""
    text = str(error)
    if not any(library in text for library in ("NCCL", "CUDA", "Cuda")):
        return None
    if "invalid usage" in text or "Duplicate GPU" in text:
        return Explanation(
            exit_code=BadConfig.exit_code,
            reason=f"NCCL initialisation failed: {_first_sentence(error)}",
            next_step="start one process per GPU, with one torchrun per node",
        )
    if "ECC" in text:
        return Explanation(
            exit_code=RanksLost.exit_code,
            reason=f"uncorrectable ECC error of a GPU: {_first_sentence(error)}",
            next_step=f"{_RUN_AGAIN}; exclude this node",
        )
    return None


def _explain_file_error(error: OSError) -> Explanation:
    if error.errno in PASSING_ERRORS:
        return Explanation(
            exit_code=DiskTrouble.exit_code,
            reason=str(error),
            next_step=f"{_RUN_AGAIN}, once the file system is available",
        )
    return Explanation(
        exit_code=BadConfig.exit_code,
        reason=str(error),
        next_step="check that disk or file",
    )


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, without the position in the source.

    Errors of C++ begin with it, such as ``[gloo/transport/tcp/pair.cc:547] ``.
    """
    first_line, _, _ = str(error).strip().partition("\n")
    without_position = re.sub(r"^\[[^\]]*\]\s*", "", first_line)
    sentence, _, _ = without_position.partition(". ")
    return sentence[:_MAX_REASON_LENGTH]
