"""SLURM or torchrun job of this process, and the run that it began before a restart.

No torch here.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from trainer.config.resolve import ResolvedConfig
from trainer.errors import BadConfig
from trainer.record.run_record import RUN_FILE, read_header
from trainer.record.start_clock import start_ticks

_RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Environment variables with the number of restarts of a job."""


def job_name(environment: Mapping[str, str]) -> str:
    """Return a name of this process's SLURM or torchrun job that survives a restart.

    The name is empty without such a job.
    """
    if environment.get("SLURM_JOB_ID"):
        return f"slurm-{environment['SLURM_JOB_ID']}"
    if environment.get("TORCHELASTIC_RUN_ID"):
        # Its start time makes the name unique, as the system reuses process IDs.
        torchrun_id = os.getppid()
        started = start_ticks(torchrun_id)
        return f"torchrun-{socket.gethostname()}-{torchrun_id}-{started}"
    return ""


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Return whether SLURM or torchrun has restarted this process's job."""
    counts = [environment.get(name) or "0" for name in _RESTART_COUNTS]
    return any(int(count) > 0 for count in counts)


def find_run_of_job(job: str, resolved: ResolvedConfig) -> Path | None:
    """Find the newest run of a job with this configuration, in ``runs``.

    The configuration is compared, as a job may train more than one model.

    Returns:
        The run's directory; None if there is none, or if ``job`` is empty.
    """
    if not job:
        return None
    run_files = sorted(
        Path("runs").glob(f"*/{RUN_FILE}"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for run_file in run_files:
        with contextlib.suppress(BadConfig):  # a header that cannot be read is skipped
            header = read_header(run_file.parent)
            if header.job == job and header.config_sha256 == resolved.config_sha256:
                return run_file.parent
    return None
