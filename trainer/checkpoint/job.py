"""The job that started this process (SLURM or torchrun), and the run that it began.

A restarted job finds its run by the job's name. No torch here.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from trainer.config.resolve import ResolvedConfig
from trainer.formats.errors import BadConfig
from trainer.formats.process_status import start_ticks
from trainer.formats.run_record import RUN_FILE, read_header

_RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Environment variables that count the restarts of a job."""


def job_name(environment: Mapping[str, str]) -> str:
    """Return a name of this process's SLURM or torchrun job that survives a restart.

    The name is empty without such a job.
    """
    if environment.get("SLURM_JOB_ID"):
        return f"slurm-{environment['SLURM_JOB_ID']}"
    if environment.get("TORCHELASTIC_RUN_ID"):
        # Restarted ranks have the same torchrun as parent. Its start time makes the
        # name unique, as the system reuses process IDs.
        torchrun_pid = os.getppid()
        started_ticks = start_ticks(torchrun_pid)
        return f"torchrun-{socket.gethostname()}-{torchrun_pid}-{started_ticks}"
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
