"""The page cache of files: how much of them lies in memory, and reading all of them into it."""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

_CACHESTAT = 451
"""System call, of Linux 6.5 and later; the number is the same on all architectures but alpha."""
_PIECE_BYTES = 2**24
_MAPPED_BYTES = 2**30


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


def cached_share(paths: Sequence[Path]) -> float | None:
    """Part of the files' bytes that lies in memory; None where nobody can say.

    Older kernels answer for files that one may write only.

    Raises:
        OSError: If a file cannot be opened.
    """
    sizes = [path.stat().st_size for path in paths]
    shares = [_counted(path, size) for path, size in zip(paths, sizes, strict=True)]
    if any(share is None for share in shares):
        shares = [_mapped(path, size) for path, size in zip(paths, sizes, strict=True)]
    known = [(share, size) for share, size in zip(shares, sizes, strict=True) if share is not None]
    weight = sum(size for _, size in known)
    return sum(share * size for share, size in known) / weight if weight else None


def fetch(paths: Sequence[Path], progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Read files once, so that what is read next comes from memory as far as that holds them.

    Args:
        paths: The files.
        progress: Called with the bytes read and those to read.

    Raises:
        OSError: If one cannot be read.
    """
    total, done = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while piece := len(file.read(_PIECE_BYTES)):
                done += piece
                progress(done, total)


def _counted(path: Path, size: int) -> float | None:
    """As the kernel counts pages."""
    if not size:
        return 0.0
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = _CacheStat()
        whole = _Range(0, size)
        if call(_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(found), 0):
            return None
    finally:
        os.close(fd)
    pages = -(-size // os.sysconf("SC_PAGE_SIZE"))
    return min(1.0, int(found.cached) / pages)


def _mapped(path: Path, size: int) -> float | None:
    """As the kernel tells of a mapping: of files that one may write only, for others it calls every page resident."""
    if not size:
        return 0.0
    if not os.access(path, os.W_OK):
        return None
    page, resident = mmap.PAGESIZE, 0
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError):
        return None
    with path.open("rb") as file:
        for start in range(0, size, _MAPPED_BYTES):
            length = min(_MAPPED_BYTES, size - start)
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as mapping:
                held = np.zeros(-(-length // page), dtype=np.uint8)
                view = np.frombuffer(mapping, dtype=np.uint8)
                refused = mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length), held.ctypes)
                del view  # a mapping that is looked at cannot be closed
            if refused:
                return None
            resident += int(np.count_nonzero(held & 1))
    return resident / -(-size // page)
