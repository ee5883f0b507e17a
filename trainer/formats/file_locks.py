"""Locks on files, by which one process at a time uses a directory. No torch here."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS_ERRORS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers of file systems without locks."""
_POLL_S = 0.1
"""Interval between tries to get a lock that another process holds, in seconds."""


class LockHeld(Exception):
    """Another process held a lock until the timeout; the message is the lock's path."""


def open_locked(
    path: Path, timeout_s: float = 0.0, *, needed: bool = True
) -> int | None:
    """Open a file, creating it if needed, and lock it until the descriptor is closed.

    The kernel releases the lock when the process ends, even if it is killed.

    Args:
        path: Lock file; a symbolic link is an error.
        timeout_s: Longest wait for another process, in seconds.
        needed: Whether it is an error if the file system has no locks.

    Returns:
        The file descriptor, or None if the file system has no locks.

    Raises:
        LockHeld: If another process holds the lock for ``timeout_s``.
        OSError: If the file cannot be opened or locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    has_lock = False
    try:
        _wait_for_lock(fd, path, timeout_s)
        has_lock = True
    except OSError as error:
        if needed or error.errno not in _NO_LOCKS_ERRORS:
            raise
    finally:
        if not has_lock:
            os.close(fd)
    return fd if has_lock else None


def _wait_for_lock(fd: int, path: Path, timeout_s: float) -> None:
    """Lock an open file.

    Raises:
        LockHeld: If another process holds the lock for ``timeout_s``.
        OSError: If the file cannot be locked.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                raise LockHeld(str(path)) from error
            time.sleep(_POLL_S)
        else:
            return


@contextlib.contextmanager
def locked(
    path: Path, timeout_s: float = 0.0, *, needed: bool = True
) -> Iterator[int | None]:
    """Hold the lock of ``open_locked``, with its arguments and errors, for the block.

    The lock file is not removed, as another process may be waiting for its lock.
    """
    fd = open_locked(path, timeout_s, needed=needed)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)
