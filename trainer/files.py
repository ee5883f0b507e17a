"""Files that survive anything: atomic and synced writes, whole lines, locks, and checksums. No torch here."""

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
"""What begins and ends at multiples of this can go to any disk directly."""
_WRITTEN_AT_ONCE_BYTES = 4 * 2**20
_READ_AT_ONCE_BYTES = 2**20
"""Few enough to be in the cache when their checksum is taken."""
_CANNOT_SYNC = (errno.EINVAL, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without locks say."""
_POLL_S = 0.1

PASSING_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.EHOSTDOWN}
"""What file systems say while they are not well: it may be over when the job starts again, on other nodes."""


class DamagedFile(Exception):
    """A file is not as it was written; the message says what is wrong."""


class LockHeld(Exception):
    """Another process held a lock all the time."""


class FileEntry(StrictTable):
    """A file, as it was written."""

    name: str
    bytes: int
    crc32: int
    """As zlib's; zlib-ng takes a third of the time for it."""


def write_file(path: Path, content: memoryview, *, progressed: Callable[[], None] = lambda: None) -> FileEntry:
    """Write a file from scratch, and sync it; ``progressed`` is called now and then.

    If memory and file system allow it, bytes go to the disk without a copy in the page cache, which would take memory
    bandwidth and a core from a training that goes on meanwhile.
    """
    import numpy as np

    checksum = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        direct = len(content) > 0 and np.frombuffer(content, dtype=np.uint8).ctypes.data % DISK_BLOCK_BYTES == 0
        for begin in range(0, len(content), _WRITTEN_AT_ONCE_BYTES):
            chunk = content[begin : begin + _WRITTEN_AT_ONCE_BYTES]
            checksum = crc32(chunk, checksum)
            direct = direct and not len(chunk) % DISK_BLOCK_BYTES and _write_directly(fd, chunk)
            if not direct:
                _write_all(fd, chunk)
            progressed()
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileEntry(name=path.name, bytes=len(content), crc32=checksum)


def _write_directly(fd: int, chunk: memoryview) -> bool:
    """Whether the file system takes it past the page cache; if not, none of it was written."""
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
    """Read a file; raise ``DamagedFile`` if it differs, ``OSError`` if it cannot be read."""
    status = path.stat(follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedFile(f"{path} is not a file")
    if status.st_size != entry.bytes:
        raise DamagedFile(f"{path} has {status.st_size:,} bytes instead of {entry.bytes:,}")
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_AT_ONCE_BYTES):
            checksum = crc32(chunk, checksum)
    if checksum != entry.crc32:
        raise DamagedFile(f"{path} is not as it was written: its checksum differs")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk; file systems that cannot are left alone."""
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
    """Write a file so that readers see the old content or the new one, never a part.

    Its directory is there; after an error nothing is left beside it. ``durable`` waits until it is on the disk.
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
    """Append all of it, or nothing: a disk that fills up in the middle must not leave half a line.

    ``durable`` waits until it is on the disk.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        before = os.fstat(fd).st_size
        try:
            _write_all(fd, memoryview(content))
        except OSError:
            with contextlib.suppress(OSError):  # a device has no length
                os.ftruncate(fd, before)
            raise
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    if durable and not before:
        sync(path.parent)


def open_locked(path: Path, timeout_s: float = 0.0, *, needed: bool = True) -> int | None:
    """Open a file, made if it is not there, and keep other processes from it until the descriptor is closed.

    The kernel lets go of it with the process, however that ends. If it is not ``needed``, None is returned on a file
    system without locks. ``LockHeld`` is raised if another process held it for so long, else ``OSError``.
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
def locked(path: Path, timeout_s: float = 0.0, *, needed: bool = True) -> Iterator[int | None]:
    """Hold the lock of ``open_locked`` during the block, which gets the file's descriptor.

    The file stays, as another process may be waiting for it by its inode.
    """
    fd = open_locked(path, timeout_s, needed=needed)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)
