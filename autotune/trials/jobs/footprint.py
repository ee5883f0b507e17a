"""Host resources of a rank and its DataLoader workers: memory and storage reads."""

import contextlib
import gc
import math
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from trainer.distributed.ranks import Ranks
from trainer.record.process_memory import status_bytes

_UNREADABLE = (psutil.Error, AttributeError, OSError, RuntimeError, ValueError)
"""Exceptions that psutil raises if /proc is missing, hidden or blank."""


def memory_bytes() -> int | None:
    """Return the memory of this process and its children, shared pages in parts (PSS).

    Return None if it cannot be read.
    """
    return _sum_over_family(lambda process: process.memory_full_info().pss)


def private_bytes_of_children() -> list[int]:
    """Return the memory that each child has for itself alone (USS).

    Return an empty list if it cannot be read.
    """
    with contextlib.suppress(*_UNREADABLE):
        return [
            child.memory_full_info().uss
            for child in psutil.Process().children(recursive=True)
        ]
    return []


def storage_read_bytes() -> int | None:
    """Return the bytes read from storage for this process and its children.

    Return None if the kernel does not count them.
    """
    return _sum_over_family(lambda process: process.io_counters().read_bytes)


def _sum_over_family(figure: Callable[[psutil.Process], int]) -> int | None:
    """Return the sum of a figure over this process and its descendants."""
    with contextlib.suppress(*_UNREADABLE):
        this_process = psutil.Process()
        family = [this_process, *this_process.children(recursive=True)]
        return sum(figure(process) for process in family)
    return None


class Memory:
    """Highest growth of memory since the creation of this object.

    On a GPU it is the growth of the allocator's reserve, on a CPU of resident pages.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before_bytes: int | None = None
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(ranks.device)
            self._before_bytes = torch.cuda.memory_reserved(ranks.device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self._before_bytes = psutil.Process().memory_info().rss

    def peak_bytes(self) -> int | None:
        """Return the highest growth of any rank; all ranks call it together.

        Return None if the kernel does not report it on some rank.
        """
        growth_bytes = math.nan
        if self._before_bytes is not None:
            growth_bytes = max(0, self._highest_bytes() - self._before_bytes)
        is_missing = 1.0 if math.isnan(growth_bytes) else 0.0
        highest_bytes, any_missing = self._ranks.all_reduce_max(
            growth_bytes, is_missing
        )
        return None if any_missing else round(highest_bytes)

    def _highest_bytes(self) -> int:
        device = self._ranks.device
        if device.type == "cuda":
            return torch.cuda.max_memory_reserved(device)
        return status_bytes("VmHWM")
