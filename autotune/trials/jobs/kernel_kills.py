"""The kernel's count of processes that it has killed because memory ran out."""

import contextlib
import re
from pathlib import Path

_HOST_COUNTER = Path("/proc/vmstat")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_kernel_kills() -> int:
    """Return how often the kernel has killed a process for memory.

    The count is that of this process's control group, or else of this host; 0 if the
    kernel reports neither.
    """
    for counter in [*_control_group_counters(), _HOST_COUNTER]:
        with contextlib.suppress(OSError):
            kills = _KILLS.search(counter.read_text())
            if kills:
                return int(kills[1])
    return 0


def _control_group_counters() -> list[Path]:
    """Return the files that count the kills in this process's control groups.

    A host has control groups of version 2, of version 1, or of both; a group may be
    hidden, and its file absent.
    """
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    counters = []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2
            counters.append(Path(f"/sys/fs/cgroup/{group}/memory.events"))
        elif controllers == "memory":  # version 1
            counters.append(Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
    return counters
