"""CPU binding: a rank runs on the CPU cores near its GPU, in training and in trials.

No torch here. Like torchrun's ``--numa-binding=node``, but without ``numactl``, and
with any launcher.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from trainer.formats.cpu_environment import NUMA_VARIABLE


def bind_to_nearest_cpus(
    pci_address: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> frozenset[int]:
    """Bind all current and future threads to the CPUs near a GPU.

    These are the allowed CPUs of its NUMA node.

    Args:
        pci_address: Address of the GPU, such as ``0000:dc:00.0``.
        environment: Environment variables, of which one disables CPU binding.
        root: Root of the file system with ``/sys``.

    Returns:
        The CPUs, or none if nothing was bound.
    """
    if environment.get(NUMA_VARIABLE) == "0":
        return frozenset()
    near = _cpus_near(pci_address, root) & os.sched_getaffinity(0)
    if near:
        # Threads of libraries that are already loaded have their own masks.
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), near)
    return frozenset(near)


def _cpus_near(pci_address: str, root: Path) -> set[int]:
    """Return the CPUs of a GPU's NUMA node; none if they are unknown."""
    device = root / "sys/bus/pci/devices" / pci_address.lower()
    try:
        node = int((device / "numa_node").read_text())
        # -1 on a machine with a single node, for which there is no list.
        cpu_list = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return set()
    cpus: set[int] = set()
    # The kernel's list format, such as ``0-3,8``.
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", cpu_list):
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
