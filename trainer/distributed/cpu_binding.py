"""CPU binding: a rank runs on the CPU cores near its GPU, in training and in trials.

No torch here.

Like torchrun's ``--numa-binding=node``, but without ``numactl``, and with any launcher.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

NUMA_VARIABLE = "AUTOTUNE_NUMA_BINDING"
"""Environment variable: ``0`` disables CPU binding."""


def bind_to_nearest_cpus(
    pci_address: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> frozenset[int]:
    """Bind all current and future threads to the allowed CPUs of a GPU's NUMA node.

    Return those, or none.
    """
    if environment.get(NUMA_VARIABLE) == "0":
        return frozenset()
    try:
        node = int(
            (
                root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node"
            ).read_text()
        )
        # -1 on a machine with a single node, for which there is no list.
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return frozenset()
    # The kernel's list format, such as ``0-3,8``.
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
    near = {
        cpu
        for first, last in ranges
        for cpu in range(int(first), int(last or first) + 1)
    }
    near &= os.sched_getaffinity(0)
    # Threads of libraries that are already loaded have their own masks.
    for thread in Path("/proc/self/task").iterdir() if near else ():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), near)
    return frozenset(near)
