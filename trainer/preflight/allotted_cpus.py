"""CPUs that a process may use, which are fewer than the machine has.

``os.cpu_count()`` ignores CPU affinity, the quotas of containers, and SLURM.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path


def allotted_cpus(
    unbound_cpus: int | None = None,
    environment: Mapping[str, str] = os.environ,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the number of CPUs that this process may use.

    It is the least of its affinity, the quotas of its control group (v2 and v1) and
    SLURM's CPUs per task.

    Args:
        unbound_cpus: Affinity before this process was bound to some CPUs; None if it
            was not.
        environment: Environment variables.
        cgroup_root: Root of the control groups.
    """
    if unbound_cpus is None:
        unbound_cpus = len(os.sched_getaffinity(0))
    limits = [unbound_cpus]
    limits += _cgroup_v2_cpus(cgroup_root)
    limits += _cgroup_v1_cpus(cgroup_root)
    with contextlib.suppress(ValueError):
        limits.append(int(environment.get("SLURM_CPUS_PER_TASK", "")))
    return min(limits)


def _cgroup_v2_cpus(root: Path) -> list[int]:
    """Return the CPU quotas of this process's control group and all above it."""
    limits = []
    # A system without control groups, or with other content, sets no limit.
    with contextlib.suppress(OSError, ValueError):
        groups = Path("/proc/self/cgroup").read_text()
        match = re.search(r"^0::/?(.*)$", groups, re.MULTILINE)
        group = Path(match[1]) if match else Path()
        for level in (group, *group.parents):
            with contextlib.suppress(OSError):
                quota_us, period_us = (root / level / "cpu.max").read_text().split()
                if quota_us != "max":
                    limits.append(_whole_cpus(int(quota_us), int(period_us)))
    return limits


def _cgroup_v1_cpus(root: Path) -> list[int]:
    """Return the CPU quota of the older control groups, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        if quota_us > 0:  # -1 is no limit
            return [_whole_cpus(quota_us, period_us)]
    return []


def _whole_cpus(quota_us: int, period_us: int) -> int:
    """Return the number of CPUs that a quota pays for in full, but at least one."""
    return max(1, quota_us // period_us)
