"""Memory of this process: its peak, and the kernel's figures."""

import re
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: reserved by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # Not getrusage's peak, which is inherited from the parent process.
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """Return a figure of this process's ``/proc/self/status``, such as ``VmPeak``."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(match[1]) * 1024
