"""Time left of a SLURM job, and SLURM's format of times. No torch here."""

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Mapping

_SQUEUE_TIMEOUT_S = 10
"""Longest wait for ``squeue``, in seconds: the run starts without its answer if SLURM's
server does not respond."""


def slurm_left_s(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until the end of this process's SLURM job.

    Returns:
        The seconds; None without a job or a time limit, or if SLURM does not tell.
    """
    with contextlib.suppress(ValueError):
        return float(environment.get("SLURM_JOB_END_TIME", "")) - time.time()
    # Older versions of SLURM do not set the end in the environment.
    job = environment.get("SLURM_JOB_ID", "")
    squeue = shutil.which("squeue")
    if not job.isdecimal() or squeue is None:
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process = subprocess.run(
            [squeue, "--noheader", "--job", job, "--format", "%L"],
            capture_output=True,
            text=True,
            timeout=_SQUEUE_TIMEOUT_S,
            check=False,
        )
        return parse_slurm_time_s(process.stdout.strip())
    return None


def parse_slurm_time_s(text: str) -> float | None:
    """Parse SLURM's ``[days-][[hours:]minutes:]seconds`` into seconds.

    Returns:
        The seconds; None for a word such as ``UNLIMITED``.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
