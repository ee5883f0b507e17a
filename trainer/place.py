"""Where a dataset goes on a local disk: a private directory, its locks, and the room there is. No torch here.

LOCAL/autotune-<uid>/            for this user only
  <hash>/                        a published dataset, named by the first 16 digits of its hash
  <hash>.lock                    held by whoever copies; the kernel lets go of it with the process
  <hash>.<job>.json              how the leader of one job is doing, for the ranks that wait
  .partial-<hash>-<random>/      a copy at work, or a damaged one on its way out
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.attempt import wait_for_lock
from trainer.copying import DatasetFile, is_whole, sync_directory
from trainer.dataset import Manifest
from trainer.errors import BadConfig

_NAME_LENGTH = 16
_PARTIAL = re.compile(r"^\.partial-([0-9a-f]{16})-[0-9a-f]{8}$")
_REPORT = re.compile(r"^[0-9a-f]{16}\.[0-9a-f]{12}\.json$")
_REPORT_KEPT_S = 7 * 86400
SPARE_BYTES = 64 * 2**20
"""Left free on the local disk, for everything else that writes there."""
_SPARE_INODES = 8


class Place:
    """Where one dataset goes on one disk.

    Args:
        local: A directory on the node's own disk.
        manifest: Of the dataset.
    """

    def __init__(self, local: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._local = local
        self._name = manifest.dataset_hash[:_NAME_LENGTH]
        self.root = local / f"autotune-{os.getuid()}"
        self.directory = self.root / self._name

    def report_path(self, job: str) -> Path:
        """Where the leader of a job says how it is doing."""
        return self.root / f"{self._name}.{job}.json"

    def prepare(self) -> None:
        """Make the user's own directory. Every rank does: what makes it impossible is then said on every one.

        Raises:
            BadConfig: If there is no such disk, or the directory is somebody else's.
            OSError: If it cannot be made.
        """
        if not self._local.is_dir():
            raise BadConfig(f"{self._local} is not a directory", next_step="Name one on the node's own disk.")
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        status = self.root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise BadConfig(
                f"{self.root} is not a directory of yours", next_step="Have it removed, or name another disk."
            )
        if status.st_mode & 0o077:
            self.root.chmod(0o700)

    def holds_copy(self) -> bool:
        """Whether the dataset is here, whole."""
        return is_whole(self.directory, self.manifest)

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Be alone with this dataset among all processes of this user on the node.

        Raises:
            BadConfig: If another job holds it for too long.
        """
        # Never removed: somebody may be waiting for it by its inode.
        with (self.root / f"{self._name}.lock").open("ab") as lock:
            if not wait_for_lock(lock.fileno(), timeout_s):
                raise BadConfig(
                    f"another job has been copying the same dataset to {self.root} for {timeout_s:g} s",
                    next_step="See what it is doing, or wait longer.",
                )
            yield

    def clear(self) -> None:
        """Remove a damaged copy and what killed processes left; only under the lock."""
        if self.directory.exists():
            # Those who read it keep their open files. Its room is needed for the next one.
            self.directory.rename(self._new_partial())
        now_s = time.time()
        for path in list(self.root.iterdir()):
            status = path.lstat()
            if status.st_uid != os.getuid():
                continue
            if match := _PARTIAL.match(path.name):
                self._remove_partial(path, match[1])
            elif _REPORT.match(path.name) and status.st_mtime < now_s - _REPORT_KEPT_S:
                _remove_unless_locked(path)

    def _remove_partial(self, path: Path, name: str) -> None:
        if name == self._name:
            shutil.rmtree(path, ignore_errors=True)
            return
        with (self.root / f"{name}.lock").open("ab") as lock:
            if wait_for_lock(lock.fileno(), 0):
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def partial(self) -> Iterator[Path]:
        """A new directory for a copy at work; gone after the block, unless it was published."""
        directory = self._new_partial()
        try:
            directory.mkdir(mode=0o700)  # inside, as Ctrl-C may come as soon as it is there
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def publish(self, partial: Path) -> None:
        """Give a finished copy its name."""
        partial.rename(self.directory)
        sync_directory(self.root)

    def _new_partial(self) -> Path:
        return self.root / f".partial-{self._name}-{secrets.token_hex(4)}"

    def check_room(self, files: Sequence[DatasetFile]) -> None:
        """See whether the files fit.

        Raises:
            BadConfig: If they do not: what is needed, what is there, and what is missing.
        """
        disk = os.statvfs(self.root)
        if disk.f_bavail * disk.f_frsize < _needed_bytes(files):
            raise self._too_full(files)
        missing_inodes = len(files) + _SPARE_INODES - disk.f_favail
        if disk.f_files and missing_inodes > 0:
            raise BadConfig(
                f"{self._local} has room for {disk.f_favail:,} more files, and the dataset has {len(files):,}",
                next_step=f"Remove {missing_inodes:,} files there, or name another disk.",
            )

    @contextlib.contextmanager
    def filling(self, files: Sequence[DatasetFile]) -> Iterator[None]:
        """A disk or a quota that fills up inside the block is told as ``check_room`` tells it."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._too_full(files) from error
            if error.errno == errno.EDQUOT:
                raise BadConfig(
                    f"your quota in {self._local} was used up, and the dataset takes {_mib(_size_bytes(files))}",
                    next_step="Remove files of yours there, or name another disk.",
                ) from error
            raise

    def _too_full(self, files: Sequence[DatasetFile]) -> BadConfig:
        disk = os.statvfs(self.root)
        free_bytes = disk.f_bavail * disk.f_frsize
        missing_bytes = _needed_bytes(files) - free_bytes
        another = "or name another disk."
        return BadConfig(
            f"{self._local} has {_mib(free_bytes)} free, and the dataset takes {_mib(_size_bytes(files))} "
            f"({_mib(SPARE_BYTES)} more are to stay free)",
            next_step=f"Free {_mib(missing_bytes)} there, {another}"
            if missing_bytes > 0
            else f"It was full for a while, and has room again: try again, {another}",
        )


@contextlib.contextmanager
def writing(local: Path) -> Iterator[None]:
    """Say where it was that the operating system refused something."""
    try:
        yield
    except OSError as error:
        raise BadConfig(
            f"cannot write in {local}: {error.strerror or error}",
            next_step="Free room there, ask for permission, or name another directory.",
        ) from error


def _remove_unless_locked(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def _size_bytes(files: Sequence[DatasetFile]) -> int:
    return sum(file.size_bytes for file in files)


def _needed_bytes(files: Sequence[DatasetFile]) -> int:
    return _size_bytes(files) + SPARE_BYTES


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // 2**20):,} MiB"
