"""Crash-safe files: atomic and synced writes, whole lines, locks, and checksums.

No torch here.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from trainer.config.tables import StrictTable

DISK_BLOCK_BYTES = 4096
"""Alignment of memory and file offsets for direct I/O (``O_DIRECT``) on any disk."""
_WRITTEN_AT_ONCE_BYTES = 4 * 2**20
_READ_AT_ONCE_BYTES = 2**20
"""Chunk size when reading, small enough to be in the CPU cache when its checksum is
computed."""
_CANNOT_SYNC = (errno.EINVAL, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_POLL_S = 0.1

PASSING_ERRORS = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
}
"""Error numbers of file system failures that may be gone when the job restarts."""


class CorruptFile(Exception):
    """A file was modified after it was written; the message gives the difference."""


class LockHeld(Exception):
    """Another process held a lock until the timeout."""


class FileEntry(StrictTable):
    """Name, size and checksum of a file as it was written."""

    name: str
    bytes: int
    crc32: int
    """CRC-32 as in zlib; zlib-ng computes it in a third of the time."""


def write_file(
    path: Path, content: memoryview, *, progressed: Callable[[], None] = lambda: None
) -> FileEntry:
    """Write a file from scratch and sync it.

    ``progressed`` is called after each chunk.
    """
    import numpy as np

    checksum = 0
    with path.open("wb", buffering=0) as file:
        fd = file.fileno()
        # Direct I/O bypasses the page cache, which would take memory bandwidth and a
        # CPU core from training.
        direct = (
            len(content) > 0
            and np.frombuffer(content, dtype=np.uint8).ctypes.data % DISK_BLOCK_BYTES
            == 0
        )
        for begin in range(0, len(content), _WRITTEN_AT_ONCE_BYTES):
            chunk = content[begin : begin + _WRITTEN_AT_ONCE_BYTES]
            checksum = crc32(chunk, checksum)
            direct = (
                direct
                and not len(chunk) % DISK_BLOCK_BYTES
                and _write_directly(fd, chunk)
            )
            if not direct:
                _write_all(fd, chunk)
            progressed()
        os.fsync(fd)
    return FileEntry(name=path.name, bytes=len(content), crc32=checksum)


def _write_directly(fd: int, chunk: memoryview) -> bool:
    """Write a chunk with direct I/O.

    Return False if the file system does not support it, with nothing written.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    begin = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        written = os.write(fd, chunk)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT):
            raise
        written = 0
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    if written < len(chunk):
        os.lseek(fd, begin, os.SEEK_SET)
    return written == len(chunk)


def _write_all(fd: int, chunk: memoryview) -> None:
    done = 0
    while done < len(chunk):
        done += os.write(fd, chunk[done:])


def check_file(path: Path, entry: FileEntry) -> None:
    """Compare a file with its entry.

    Raises:
        CorruptFile: If it differs, ``OSError`` if it cannot be read.
    """
    status = path.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFile(f"{path} is not a file")
    if status.st_size != entry.bytes:
        raise CorruptFile(
            f"{path} has {status.st_size:,} bytes, expected {entry.bytes:,}"
        )
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_AT_ONCE_BYTES):
            checksum = crc32(chunk, checksum)
    if checksum != entry.crc32:
        raise CorruptFile(f"{path} was modified: its checksum does not match")


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk.

    File systems without such a sync are skipped.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file so that readers see the old or the new content, never a part.

    ``durable`` waits for the disk.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def append_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Append all or nothing, so that a full disk leaves no partial line.

    ``durable`` waits for the disk.
    """
    with path.open("ab", buffering=0) as file:
        fd = file.fileno()
        before = os.fstat(fd).st_size
        try:
            _write_all(fd, memoryview(content))
        except OSError:
            with contextlib.suppress(OSError):  # a device has no length
                os.ftruncate(fd, before)
            raise
        if durable:
            os.fsync(fd)
    if durable and not before:
        sync(path.parent)


def open_locked(
    path: Path, timeout_s: float = 0.0, *, needed: bool = True
) -> int | None:
    """Open a file, creating it if needed, and lock it until the descriptor is closed.

    The kernel releases the lock when the process ends, even if it is killed. Without
    ``needed``, a file system without locks returns None. Raises ``LockHeld`` if another
    process holds the lock for ``timeout_s``, otherwise ``OSError``.
    """
    with contextlib.ExitStack() as undone:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        undone.callback(os.close, fd)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    raise LockHeld(str(path)) from error
                time.sleep(_POLL_S)
            except OSError as error:
                if needed or error.errno not in _NO_LOCKS:
                    raise
                return None
            else:
                undone.pop_all()
                return fd


@contextlib.contextmanager
def locked(
    path: Path, timeout_s: float = 0.0, *, needed: bool = True
) -> Iterator[int | None]:
    """Hold the lock of ``open_locked`` for the block.

    The file stays, as another process may wait for its inode.
    """
    fd = open_locked(path, timeout_s, needed=needed)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)
