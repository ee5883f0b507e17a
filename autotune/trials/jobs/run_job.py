"""Run a job in this process, and turn each way in which it ends into a result."""

import contextlib
import importlib
import os
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.trials.jobs.budget import lift_memory_limit
from autotune.trials.messages import JobResult, JobStatus, encode
from autotune.trials.values import JOB_MODULES
from trainer.formats.errors import TrainerError
from trainer.formats.files import write_atomically
from trainer.runtime.out_of_memory import is_vague, out_of_memory

if TYPE_CHECKING:
    from trainer.runtime.ranks import Ranks

MAX_TRACEBACK_CHARACTERS = 2000
"""Characters of a traceback that a result quotes, from its end: the innermost calls."""
_LOST_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe"
    r"|gloo/transport|ncclRemote"
)
"""Messages of gloo and NCCL if another rank is gone."""


def run_job(
    job: str,
    result_file: Path,
    measured: dict[str, Any],
    local: dict[str, Any],
    joined_ranks: "Ranks | None" = None,
) -> bool:
    """Run a job and write its ``JobResult``.

    Args:
        job: Name of a job, or of a module with a function ``run`` that takes
            ``measured`` and ``local``, and ``joined_ranks`` if they are given, and
            returns figures.
        result_file: File to write. On a node that does not see its directory, none is
            written: the first node's is what counts.
        measured: Input that defines the measurement.
        local: Input that depends on this machine. A true ``first_attempt`` means that
            the trial is tried again after a crash.
        joined_ranks: Ranks that have joined, for a job that runs on them.

    Returns:
        True if the job measured its figures.
    """
    pid_before = os.getpid()
    try:
        module = importlib.import_module(JOB_MODULES.get(job, job))
        if joined_ranks is None:
            figures = module.run(measured, local)
        else:
            figures = module.run(measured, local, joined_ranks)
        lift_memory_limit()
        result = JobResult(status=JobStatus.MEASURED, figures=figures)
    except Exception as error:  # noqa: BLE001 - the border of the process: every failure becomes an outcome
        lift_memory_limit()
        result = _failure(error, is_first_attempt=local.get("first_attempt", False))
    if os.getpid() != pid_before:
        # The job's code has forked this process. Only the original writes the result.
        os._exit(1)
    with contextlib.suppress(FileNotFoundError):
        write_atomically(result_file, encode(result), durable=False)
    return result.status is JobStatus.MEASURED


def _failure(error: Exception, *, is_first_attempt: bool) -> JobResult:
    """Return the result of a job that raised an error.

    On a first attempt, an error that may have another cause than memory counts as a
    crash, so that the trial is tried again. Otherwise a broken kernel would pass for a
    size that does not fit.
    """
    if isinstance(error, TrainerError):
        return JobResult(
            status=JobStatus.REJECTED,
            detail=error.message,
            next_step=error.next_step,
            exit_code=error.exit_code,
        )
    memory_message = out_of_memory(error)
    if memory_message is not None:
        status = JobStatus.OUT_OF_MEMORY
        if is_first_attempt and is_vague(memory_message):
            status = JobStatus.CRASHED
        return JobResult(status=status, detail=memory_message)
    status = JobStatus.CRASHED
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        # Another rank failed first, and its own result says why.
        status = JobStatus.LOST_PEER
    stack = traceback.format_exc()[-MAX_TRACEBACK_CHARACTERS:]
    return JobResult(status=status, detail=stack)
