"""Entry point of a trial's process: run the job, and write an account of how it ended."""

import importlib
import json
import re
import resource
import time
import traceback
from pathlib import Path
from typing import Any

from autotune.trials.values import JOB_MODULES
from trainer.errors import TrainerError
from trainer.files import write_atomically
from trainer.health.failures import is_vague, out_of_memory

# gloo's and NCCL's texts for another rank that is gone.
_LOST_PEER = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe|gloo/transport|ncclRemote")


def run_job(job: str, result_file: Path, measured: dict[str, Any], place: dict[str, Any], *more: object) -> bool:
    """Run a job and write how it ended: ``status``, its details, and ``ended_s`` on the monotonic clock.

    Args:
        job: The name of a job, or a module by its full name, whose ``run`` returns figures.
        result_file: Path of the account.
        measured: ``measured`` of the trial.
        place: ``place`` of the trial. With ``first_attempt`` the trial is tried again after a crash; a fault that may
            or may not be of memory is then a crash: near the limit little is free, and a broken kernel would pass for a
            smaller limit.
        more: Further arguments of ``run``.

    Returns:
        True if the job measured its figures.
    """
    result: dict[str, Any]
    try:
        module = importlib.import_module(JOB_MODULES.get(job, job))
        result = {"status": "measured", "figures": module.run(measured, place, *more)}
        _lift_limit()
    except Exception as error:  # noqa: BLE001 - the border of the process: every failure becomes an outcome
        _lift_limit()
        result = _failure(error, place.get("first_attempt", False))
    write_atomically(result_file, json.dumps(result | {"ended_s": time.monotonic()}), durable=False)
    return bool(result["status"] == "measured")


def _failure(error: Exception, first_attempt: bool) -> dict[str, Any]:
    if isinstance(error, TrainerError):
        told = {"message": error.message, "next_step": error.next_step, "exit_code": error.exit_code}
        return {"status": "refused", **told}
    if (refusal := out_of_memory(error)) is not None:
        return {"status": "crashed" if first_attempt and is_vague(refusal) else "out_of_memory", "detail": refusal}
    # Not this rank's failure: that of the rank which it has lost.
    lost = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    return {"status": "lost_peer" if lost else "crashed", "detail": traceback.format_exc()[-2000:]}


def _lift_limit() -> None:
    """Lift the memory limit, as writing the account needs memory too."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
