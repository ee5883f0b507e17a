"""Resources that a rank takes: memory of the host and of its device, storage reads.

Host memory and storage reads include those of the rank's DataLoader workers.
"""

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from trainer.formats.process_status import status_bytes
from trainer.runtime.ranks import Ranks

_UNREADABLE = (psutil.Error, AttributeError, OSError, RuntimeError, ValueError)
"""Exceptions that psutil raises if a process has ended, or if /proc is missing, hidden
or blank."""


def memory_bytes() -> int | None:
    """Return the host memory of this process and its descendants together.

    Each shared page counts in part for every process that shares it (PSS).

    Returns:
        The bytes, or None if they cannot be read.
    """
    return _sum_over_family(lambda process: process.memory_full_info().pss)


def private_bytes_of_children() -> list[int]:
    """Return the memory that each descendant has for itself alone (USS).

    Returns:
        The bytes of each, or an empty list if those of any cannot be read.
    """
    with contextlib.suppress(*_UNREADABLE):
        return [
            descendant.memory_full_info().uss
            for descendant in psutil.Process().children(recursive=True)
        ]
    return []


def storage_read_bytes() -> int | None:
    """Return the bytes read from storage for this process and its descendants.

    Returns:
        The bytes, or None if the kernel does not count them.
    """
    return _sum_over_family(lambda process: process.io_counters().read_bytes)


def _sum_over_family(figure: Callable[[psutil.Process], int]) -> int | None:
    """Return the sum of a figure over this process and its descendants.

    Returns:
        The sum, or None if the figure of any process cannot be read.
    """
    with contextlib.suppress(*_UNREADABLE):
        this_process = psutil.Process()
        family = [this_process, *this_process.children(recursive=True)]
        return sum(figure(process) for process in family)
    return None


class MemoryGrowth:
    """Growth of a rank's memory since the creation of this object, at its highest.

    The memory is the reserve of PyTorch's allocator on a GPU, and the resident pages of
    this process on a CPU.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before_bytes: int | None = None
        """Memory at the creation; None if the kernel cannot reset its peak."""
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(ranks.device)
            self._before_bytes = torch.cuda.memory_reserved(ranks.device)
            return
        with contextlib.suppress(OSError):
            # 5 resets the kernel's peak of resident pages, ``VmHWM``.
            Path("/proc/self/clear_refs").write_text("5")
            self._before_bytes = psutil.Process().memory_info().rss

    def peak_bytes(self) -> int | None:
        """Return the highest growth of any rank; all ranks must call this together.

        Returns:
            The bytes, or None if they are not known on every rank.
        """
        growth_bytes = 0.0
        is_missing = float(self._before_bytes is None)
        if self._before_bytes is not None:
            growth_bytes = max(0, self._highest_bytes() - self._before_bytes)
        highest_growth_bytes, any_missing = self._ranks.all_reduce_max(
            growth_bytes, is_missing
        )
        return None if any_missing else round(highest_growth_bytes)

    def _highest_bytes(self) -> int:
        """Return the highest memory of this rank since the creation."""
        device = self._ranks.device
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved(device)
        return status_bytes("VmHWM")
