"""Whether torchrun can bind each rank to the processors near its GPU: where it cannot, it would not start at all."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

NUMACTL = "numactl"
"""torchrun asks for this program."""


def why_not_bound(
    pci_addresses: Sequence[str],
    *,
    root: Path = Path("/"),
    allowed: frozenset[int] | None = None,
    has_numactl: bool | None = None,
) -> str | None:
    """Why ranks cannot be bound on this node; None where they can.

    Args:
        pci_addresses: Of the GPUs in use, such as ``0000:dc:00.0``.
        root: Where ``/sys`` is looked for.
        allowed: Processors of this process; asked of the system by default.
        has_numactl: Whether that program is here; looked for by default.
    """
    if not (shutil.which(NUMACTL) is not None if has_numactl is None else has_numactl):
        return f"{NUMACTL} is not installed"
    if not pci_addresses:
        return "there is no GPU"
    mine = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    for address in pci_addresses:
        try:
            told = (root / "sys/bus/pci/devices" / address.lower() / "numa_node").read_text()
            node = max(0, int(told))  # -1 where there is only one
            near = _cpu_list((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
        except (OSError, ValueError):
            return f"the system does not say which processors are near GPU {address}"
        if not near & mine:
            return f"none of the processors near GPU {address} is allotted"
    return None


def _cpu_list(text: str) -> frozenset[int]:
    """Read the kernel's list format, such as ``0-3,8``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1))
