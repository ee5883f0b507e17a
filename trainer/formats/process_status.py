"""Figures of the kernel about a process: its memory, and when it started."""

import os
import re
import time
from pathlib import Path

_START_TIME_FIELD = 22
"""Number of the field ``starttime`` in ``/proc/PID/stat``, counted from 1."""


def process_started_s() -> float:
    """Return the start time of this process, in seconds since 1970."""
    start_s = start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")  # since the boot
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_s
    return time.time() - age_s


def start_ticks(process_id: int) -> int:
    """Return the start time of a process, in clock ticks since the boot."""
    stat = Path(f"/proc/{process_id}/stat").read_text()
    # The second field, the program's name in parentheses, may contain spaces and
    # parentheses, so fields are counted from the third; see proc_pid_stat(5).
    _, _, from_third_field = stat.rpartition(")")
    return int(from_third_field.split()[_START_TIME_FIELD - 3])


def status_bytes(name: str) -> int:
    """Return a figure of this process's ``/proc/self/status``, such as ``VmPeak``."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(match[1]) * 1024
