"""Directory of a user's datasets on a node's local disk.

A copy is hashed while it is written, synced, and renamed, so a directory named by a
hash was complete.

LOCAL/autotune-<uid>/        accessible only to this user
  <hash>/                    a published dataset, named by the first 16 digits of its
                             hash
  <hash>.lock                held by the process that copies; the kernel releases it
                             when that process ends
  .partial-<hash>-<random>/  a copy in progress, or a corrupt one to be removed
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.formats.errors import BadConfig
from trainer.formats.file_locks import LockHeld, locked
from trainer.formats.manifest import Manifest
from trainer.staging.copying import DatasetFile

SPARE_BYTES = 64 * 2**20
"""Space left free on the local disk for other writers."""
SPARE_INODES = 8
"""Inodes left free for the directory of the copy and for other writers."""
_PARTIAL = re.compile(r"^\.partial-([0-9a-f]{16})-[0-9a-f]{8}$")
"""Name of a copy in progress, whose group is the name of the published dataset."""


class StagingDirectory:
    """Directory and lock of one dataset on one local disk.

    Args:
        local: Directory on the local disk.
        manifest: Manifest of the dataset.
    """

    def __init__(self, local: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._local = local
        self._name = manifest.dataset_hash[:16]
        self.root = local / f"autotune-{os.getuid()}"
        """The user's directory."""
        self.directory = self.root / self._name
        """Directory of the published dataset."""
        self.lock = self.root / f"{self._name}.lock"
        """Lock file that gives one process on the node exclusive access to this
        dataset."""

    def prepare(self) -> None:
        """Create the user's directory.

        Raises:
            BadConfig: If the disk does not exist, or another user owns the directory.
        """
        if not self._local.is_dir():
            raise BadConfig(
                f"{self._local} not found",
                next_step="Pass a directory on the node's local disk.",
            )
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(mode=0o700)
        status = self.root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise BadConfig(
                f"{self.root} is not a directory that you own",
                next_step="Remove it, or use another disk.",
            )
        if status.st_mode & 0o077:
            self.root.chmod(0o700)

    def clear(self) -> None:
        """Remove a corrupt copy, and the partial copies of killed processes.

        Call it only while holding the lock. Partial copies of other datasets are
        removed too, unless their locks are held.
        """
        if self.directory.exists():
            # Removing is safe, as processes that read it keep their open files.
            self.directory.rename(self.new_partial())
        for path in list(self.root.iterdir()):
            match = _PARTIAL.match(path.name)
            if match is None:
                continue
            name = match[1]
            if name == self._name:
                shutil.rmtree(path, ignore_errors=True)
                continue
            # Another dataset's copy is in progress if its lock is held.
            with contextlib.suppress(LockHeld), locked(self.root / f"{name}.lock"):
                shutil.rmtree(path, ignore_errors=True)

    def new_partial(self) -> Path:
        """Return a new path for a copy in progress."""
        return self.root / f".partial-{self._name}-{secrets.token_hex(4)}"

    def check_room(
        self, files: Sequence[DatasetFile], *, filled_up: bool = False
    ) -> None:
        """Check that the disk has room for a dataset's files.

        Args:
            files: Files of the dataset.
            filled_up: True if the disk filled up while they were copied, even if it has
                room again.

        Raises:
            BadConfig: If it has none; the message names the space or inodes that are
                required and free.
        """
        disk = os.statvfs(self.root)
        free_bytes = disk.f_bavail * disk.f_frsize
        size_bytes = sum(file.size_bytes for file in files)
        missing_bytes = size_bytes + SPARE_BYTES - free_bytes
        if filled_up or missing_bytes > 0:
            remedy = "There is space again: try again,"
            if missing_bytes > 0:
                remedy = f"Free {_mib(missing_bytes)} there,"
            raise BadConfig(
                f"{self._local} has {_mib(free_bytes)} free; the dataset requires"
                f" {_mib(size_bytes)} and {_mib(SPARE_BYTES)} to spare",
                next_step=f"{remedy} or pass another disk.",
            )
        missing_inodes = len(files) + SPARE_INODES - disk.f_favail
        # Some file systems make inodes as they are needed, and report none.
        if disk.f_files and missing_inodes > 0:
            raise BadConfig(
                f"{self._local} has inodes for {disk.f_favail:,} more files; the"
                f" dataset has {len(files):,}",
                next_step=(
                    f"Remove {missing_inodes:,} files there, or pass another disk."
                ),
            )

    @contextlib.contextmanager
    def writing(self, files: Sequence[DatasetFile] = ()) -> Iterator[None]:
        """Convert an ``OSError`` in the block, which writes there, to ``BadConfig``.

        Args:
            files: Files of the dataset if the block copies them: the message then tells
                whether space or a quota ran out.
        """
        try:
            yield
        except OSError as error:
            if files and error.errno == errno.ENOSPC:
                self.check_room(files, filled_up=True)
            message = f"cannot write to {self._local}: {error.strerror or error}"
            next_step = "Free disk space, check permissions, or pass another directory."
            if files and error.errno == errno.EDQUOT:
                size_bytes = sum(file.size_bytes for file in files)
                message = (
                    f"the dataset ({_mib(size_bytes)}) exceeds your quota in"
                    f" {self._local}"
                )
                next_step = "Remove files there, or pass another disk."
            raise BadConfig(message, next_step=next_step) from error


def _mib(size_bytes: int) -> str:
    """Return a size in MiB as text, rounded up."""
    return f"{-(-size_bytes // 2**20):,} MiB"
