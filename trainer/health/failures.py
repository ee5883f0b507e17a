"""Explanation of the errors that end a training, each with a next step.

An error is out of memory, the loss of other ranks, a failure of a disk, or a crash.
"""

import os
import re
from dataclasses import dataclass

from trainer.formats.errors import (
    BadConfig,
    DeviceOutOfMemory,
    DiskTrouble,
    RanksLost,
)
from trainer.formats.files import PASSING_ERRORS
from trainer.health.watchdog import REQUEUE
from trainer.runtime.out_of_memory import out_of_memory

_LOWER_BATCH_SIZE = (
    "lower train.micro_batch_size, or find the largest that fits: autotune probe"
    " --model MODEL --data DIR"
)
_RUN_AGAIN = "run the same command again: it resumes from the newest checkpoint"

_NCCL_CODE = re.compile(r"nccl[A-Z]\w+Error|ncclInvalidArgument")
"""NCCL's codes of failures; the one missing, ``ncclInvalidUsage``, is a GPU fault for
``_explain_gpu_fault``."""
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
