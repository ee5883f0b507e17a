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

_RESTART_COUNTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Environment variables with the number of restarts of a job."""
_START_TIME_FIELD = 22
"""Number of the field ``starttime`` in ``/proc/PID/stat``, counted from 1."""


def job_name(environment: Mapping[str, str]) -> str:
    """Return a name of this process's SLURM or torchrun job that survives a restart.

    The name is empty without such a job.
    """
    if environment.get("SLURM_JOB_ID"):
        return f"slurm-{environment['SLURM_JOB_ID']}"
    if environment.get("TORCHELASTIC_RUN_ID"):
        torchrun = os.getppid()
        return f"torchrun-{socket.gethostname()}-{torchrun}-{_start_time(torchrun)}"
    return ""


def _start_time(process: int) -> str:
    """Return the start time of a process, in clock ticks since the boot.

    With it a name is unique, as the system uses numbers of processes again.
    """
    stat = Path(f"/proc/{process}/stat").read_text()
    # The second field, the program's name in parentheses, may contain spaces; see
    # proc_pid_stat(5).
    _, _, from_third_field = stat.rpartition(")")
    return from_third_field.split()[_START_TIME_FIELD - 3]


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Return whether SLURM or torchrun has restarted this process's job."""
    counts = [environment.get(name) or "0" for name in _RESTART_COUNTS]
    return any(int(count) > 0 for count in counts)


def find_run_of_job(job: str, resolved: ResolvedConfig) -> Path | None:
    """Return the newest run of a job with this configuration, or None.

    The configuration is compared, as a job may train more than one model.
    """
    if not job:
        return None
    run_files = sorted(
        Path("runs").glob(f"*/{RUN_FILE}"),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for run_file in run_files:
        with contextlib.suppress(BadConfig):  # a record that cannot be read
            header = read_header(run_file.parent)
            if header.job == job and header.config_sha256 == resolved.config_sha256:
                return run_file.parent
    return None
