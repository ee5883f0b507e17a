"""What a rank and its loader workers take of the host: memory, and reads from storage."""

import contextlib
import os
from collections.abc import Iterator

import psutil

_UNREADABLE = (psutil.Error, AttributeError, OSError, RuntimeError, ValueError)
"""What psutil raises where /proc is missing, hidden or blank."""


def memory_bytes() -> int | None:
    """Of this process and its children, each shared page counted in parts (PSS); None where it cannot be read."""
    with contextlib.suppress(*_UNREADABLE):
        return sum(process.memory_full_info().pss for process in _family())
    return None


def private_bytes_of_children() -> list[int]:
    """Memory that each child has for itself alone (USS); empty where it cannot be read."""
    with contextlib.suppress(*_UNREADABLE):
        return [child.memory_full_info().uss for child in psutil.Process().children(recursive=True)]
    return []


def storage_read_bytes() -> int | None:
    """What this process and its children had storage read for them so far; None where the kernel does not count."""
    with contextlib.suppress(*_UNREADABLE):
        return sum(process.io_counters().read_bytes for process in _family())
    return None


def _family() -> Iterator[psutil.Process]:
    me = psutil.Process(os.getpid())
    yield me
    yield from me.children(recursive=True)
