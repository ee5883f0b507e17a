"""The page cache of files: how much of them lies in memory, and reading all of them into it."""

import ctypes
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

_CACHESTAT = 451
"""System call, of Linux 6.5 and later; the number is the same on all architectures but alpha."""
_PIECE_BYTES = 2**24
_PROBES = 256


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently"))


def cached_share(paths: Sequence[Path]) -> float | None:
    """Part of the files' bytes that lies in memory; None where nobody can say.

    Older kernels are asked by reads that must not wait, at a few random places; each that misses brings a page in.

    Raises:
        OSError: If a file cannot be opened.
    """
    sizes = [path.stat().st_size for path in paths]
    shares = [_counted(path, size) for path, size in zip(paths, sizes, strict=True)]
    if any(share is None for share in shares):
        total = max(1, sum(sizes))
        shares = [_probed(path, size, total) for path, size in zip(paths, sizes, strict=True)]
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


def _probed(path: Path, size: int, total: int) -> float | None:
    places = [random.randrange(size) for _ in range(max(1, _PROBES * size // total))] if size else []
    hits = 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for place in places:
            try:
                hits += bool(os.preadv(fd, (bytearray(1),), place, os.RWF_NOWAIT))
            except BlockingIOError:
                continue
            except OSError:
                return None  # this file system cannot say
    finally:
        os.close(fd)
    return hits / len(places) if places else 0.0
