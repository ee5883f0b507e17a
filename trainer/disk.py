"""Files that are whole: written past the page cache, synced, and checked when they are read. No torch here."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
from zlib_ng.zlib_ng import crc32

from trainer.schema import Table

DISK_BLOCK_BYTES = 4096
"""What begins and ends at multiples of this can go to any disk directly."""
_WRITTEN_AT_ONCE_BYTES = 4 * 2**20
_READ_AT_ONCE_BYTES = 2**20
"""Few enough to be in the cache when their checksum is taken."""


PASSING_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.EHOSTDOWN}
"""What file systems say while they are not well: it may be over when the job starts again, on other nodes."""


class DamagedFile(Exception):
    """A file is not as it was written; the message says what is wrong."""


class FileEntry(Table):
    """A file, as it was written."""

    name: str
    bytes: int
    crc32: int
    """As zlib's; zlib-ng takes a third of the time for it."""


def write_file(path: Path, content: memoryview, *, progressed: Callable[[], None] = lambda: None) -> FileEntry:
    """Write a file anew, and sync it; ``progressed`` is called now and then.

    Where memory and file system allow it, bytes go to the disk without a copy in the page cache, which would take
    memory bandwidth and a core from a training that goes on meanwhile.
    """
    checksum = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        direct = _is_aligned(content)
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


def _is_aligned(content: memoryview) -> bool:
    return len(content) > 0 and np.frombuffer(content, dtype=np.uint8).ctypes.data % DISK_BLOCK_BYTES == 0


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
    """Read a file and compare it.

    Raises:
        DamagedFile: If it differs.
        OSError: If it cannot be read.
    """
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
    """Wait until a file, or the names in a directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
