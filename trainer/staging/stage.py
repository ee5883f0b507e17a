"""Staging of a dataset on a node's local disk.

The first process of a node copies the dataset, the others wait. A copy is hashed while
it is written, synced, and renamed, so a directory named by a hash was complete.

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
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.resolve import ResolvedConfig
from trainer.data.manifest import Manifest, read_manifest
from trainer.errors import BadConfig, UnreadableFile, unreadable
from trainer.files import LockHeld, locked, sync
from trainer.record.progress import Update
from trainer.staging.copying import (
    CopyFigures,
    DatasetFile,
    copy_files,
    dataset_files,
    is_intact,
    seconds_per_sample,
)

DEFAULT_TIMEOUT_S = 3600.0
SPARE_BYTES = 64 * 2**20
"""Space left free on the local disk for other writers."""
_SPARE_INODES = 8
"""Inodes left free for the directory of the copy and for other writers."""
_PARTIAL = re.compile(r"^\.partial-([0-9a-f]{16})-[0-9a-f]{8}$")


class CacheDirectory:
    """Directory and lock of one dataset on one local disk."""

    def __init__(self, local: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._local = local
        self._name = manifest.dataset_hash[:16]
        self.root = local / f"autotune-{os.getuid()}"
        self.directory = self.root / self._name
        self.lock = self.root / f"{self._name}.lock"
        """Lock file that gives one process on the node exclusive access to this
        dataset."""

    def prepare(self) -> None:
        """Create the user's directory.

        Raises:
            BadConfig: If the disk does not exist, or it is not yours.
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
        """Remove a corrupt copy and partial copies of killed processes.

        Call it only under the lock.
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
            BadConfig: If not, with the space or inodes that are needed and free.
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
        missing_inodes = len(files) + _SPARE_INODES - disk.f_favail
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
        """Convert an ``OSError`` in the block to ``BadConfig``.

        If ``files`` are copied in the block, the message tells whether space or a quota
        ran out.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Dataset on a local disk, and the cost of its copy."""

    directory: Path
    dataset_hash: str
    samples: int
    """Number of samples in the training split."""
    copied: CopyFigures | None = None
    """Size and times of the copy; None if it existed already, or another rank copied
    it."""
    source_s_per_sample: float | None = None
    """Mean time of one reader for a random sample of the source, in seconds; None if
    nothing was copied."""
    local_s_per_sample: float | None = None
    """Mean time of one reader for a random sample of the copy, in seconds; None if
    nothing was copied."""

    @property
    def break_even_epochs(self) -> float | None:
        """Number of epochs after which the copy has saved its own time.

        None if never, or if not measured.
        """
        if (
            self.copied is None
            or self.source_s_per_sample is None
            or self.local_s_per_sample is None
        ):
            return None
        saved_s_per_sample = self.source_s_per_sample - self.local_s_per_sample
        saved_s_per_epoch = self.samples * saved_s_per_sample
        if saved_s_per_epoch <= 0:
            return None
        return self.copied.seconds / saved_s_per_epoch


def stage(
    source: Path,
    local: Path,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    update: Update = lambda done, total, note: None,
) -> Staged:
    """Copy a dataset to the local disk, unless it is there already.

    All ranks of a node call this function, and one of them copies. If that is killed,
    the next one does.

    Args:
        source: Directory of the dataset.
        local: Directory on the local disk.
        timeout_s: Longest wait for the rank that copies, in seconds.
        update: Progress callback, in bytes.

    Raises:
        BadConfig: If the source is corrupt, writing to the local disk fails, or the
            wait exceeds ``timeout_s``.
    """
    manifest = read_manifest(source)
    cache = CacheDirectory(local, manifest)
    staged = Staged(
        directory=cache.directory,
        dataset_hash=manifest.dataset_hash,
        samples=manifest.train.samples,
    )
    with cache.writing():
        cache.prepare()
        try:
            with locked(cache.lock, timeout_s):
                if is_intact(cache.directory, manifest):
                    return staged
                return _copy(cache, source, staged, update)
        except LockHeld as error:
            raise BadConfig(
                f"another process is still copying this dataset to {cache.root} after"
                f" {timeout_s:g} s",
                next_step="Check that process, or wait longer.",
            ) from error


def _copy(
    cache: CacheDirectory, source: Path, staged: Staged, update: Update
) -> Staged:
    """Copy a dataset under its lock, and measure the copy and its source."""
    cache.clear()
    files = dataset_files(source, cache.manifest)
    cache.check_room(files)
    source_s_per_sample = _measure_source(source)
    partial = cache.new_partial()
    with cache.writing(files):
        try:
            partial.mkdir(mode=0o700)  # inside the block, as Ctrl-C may come at once
            figures = copy_files(files, source, partial, cache.manifest, update)
            partial.rename(cache.directory)
            sync(cache.root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return replace(
        staged,
        copied=figures,
        source_s_per_sample=source_s_per_sample,
        local_s_per_sample=seconds_per_sample(cache.directory),
    )


def _measure_source(source: Path) -> float | None:
    """Return the mean time to read a sample of the source, in seconds.

    Raises:
        BadConfig: If the source cannot be read.
    """
    next_step = f"The source is corrupt. Find all faults: autotune data verify {source}"
    try:
        return seconds_per_sample(source)
    except UnreadableFile:
        raise
    except BadConfig as error:
        raise BadConfig(error.message, next_step=next_step) from error
    except OSError as error:
        cannot_read = unreadable(source, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise BadConfig(
            f"cannot read {source}: {error.strerror or error}", next_step=next_step
        ) from error


def stage_data(
    resolved: ResolvedConfig,
    environment: Mapping[str, str] = os.environ,
    update: Update = lambda done, total, note: None,
) -> ResolvedConfig:
    """Return the configuration, its dataset staged if ``stage_to`` is set.

    Raises:
        BadConfig: As ``stage`` does.
    """
    stage_to = resolved.config.data.stage_to
    if stage_to is None:
        return resolved
    try:
        local = Path(string.Template(stage_to).substitute(environment))
    except (KeyError, ValueError) as error:
        raise BadConfig(
            f"train.data.stage_to = {stage_to!r}: environment variable {error} is not"
            " set",
            next_step="Set it, or pass a directory: --set train.data.stage_to=/local",
        ) from error
    staged = stage(resolved.data_dir, local, update=update)
    return replace(resolved, data_dir=staged.directory)
