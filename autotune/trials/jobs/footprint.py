"""Host resources of a rank and its DataLoader workers: memory, and reads from storage."""

import contextlib
import gc
import math
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from trainer.distributed.ranks import Ranks
from trainer.record.meter import status_bytes

_UNREADABLE = (psutil.Error, AttributeError, OSError, RuntimeError, ValueError)
"""Exceptions that psutil raises if /proc is missing, hidden or blank."""


def memory_bytes() -> int | None:
    """Return the memory of this process and its children, shared pages in parts (PSS).

    None if it cannot be read.
    """
    return _sum_of_family(lambda process: process.memory_full_info().pss)


def private_bytes_of_children() -> list[int]:
    """Return the memory that each child has for itself alone (USS).

    Empty if it cannot be read.
    """
    with contextlib.suppress(*_UNREADABLE):
        return [
            child.memory_full_info().uss
            for child in psutil.Process().children(recursive=True)
        ]
    return []


def storage_read_bytes() -> int | None:
    """Return the bytes read from storage for this process and its children.

    None if the kernel does not count them.
    """
    return _sum_of_family(lambda process: process.io_counters().read_bytes)


def _sum_of_family(figure: Callable[[psutil.Process], int]) -> int | None:
    with contextlib.suppress(*_UNREADABLE):
        me = psutil.Process()
        return sum(map(figure, (me, *me.children(recursive=True))))
    return None


class Memory:
    """Highest growth of memory since its creation: of the allocator's on a GPU, of resident pages on a CPU."""

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
        """Return the highest growth of any rank, with all ranks together.

        None if the kernel does not report it.
        """
        own = math.nan
        if self._before_bytes is not None:
            on_gpu = self._ranks.device.type == "cuda"
            highest = (
                torch.cuda.max_memory_reserved(self._ranks.device)
                if on_gpu
                else status_bytes("VmHWM")
            )
            own = max(0, highest - self._before_bytes)
        most = self._ranks.all_reduce_max(own, 1.0 if math.isnan(own) else 0.0)
        return None if most[1] else round(most[0])
