"""Copying of a dataset, whose hashes are checked on the way."""

import contextlib
import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from trainer.formats.errors import BadConfig, unreadable
from trainer.formats.files import sync
from trainer.formats.manifest import (
    MANIFEST_NAME,
    PREPARED_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    Manifest,
    read_manifest,
)
from trainer.formats.npy_file import open_npy
from trainer.formats.progress import Update
from trainer.staging.threads import run_in_threads

_CHUNK_BYTES = 8 * 2**20
"""Size of a read, after which progress is reported and a request to stop is noticed."""
_THREADS = 4
"""Number of files copied at once: one reader gets a fraction of a parallel file
system's bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """File of a dataset to copy."""

    name: str
    size_bytes: int
    sha256: str | None
    """SHA-256 in hexadecimal; None if the manifest has no hash of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFigures:
    """Size and times of a copy."""

    size_bytes: int
    seconds: float
    """Wall time until everything was on disk, in seconds."""
    read_s: float
    """Time reading, summed over threads, in seconds."""
    write_s: float
    """Time writing and syncing, summed over threads, in seconds."""


def dataset_files(source: Path, manifest: Manifest) -> list[DatasetFile]:
    """Return a dataset's files, the manifest last, as it makes a copy complete.

    Raises:
        BadConfig: If one is missing or not a regular file.
    """
    files = []
    for name, sha256 in _hashes_by_name(source, manifest).items():
        with _reading(source, name):
            status = (source / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise _corrupt(source, name, "is not a regular file")
        files.append(DatasetFile(name=name, size_bytes=status.st_size, sha256=sha256))
    return files


def _hashes_by_name(source: Path, manifest: Manifest) -> dict[str, str | None]:
    """Return the name of each file of a dataset, with its SHA-256 if it has one."""
    sha256_by_name: dict[str, str | None] = {}
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        sha256_by_name[shard.tokens_file] = shard.tokens_sha256
        sha256_by_name[shard.offsets_file] = shard.offsets_sha256
    sha256_by_name[TOKENIZER_NAME] = manifest.tokenizer_sha256
    for name in (REJECTS_NAME, PREPARED_NAME):
        if (source / name).is_file():
            sha256_by_name[name] = None
    sha256_by_name[MANIFEST_NAME] = None
    return sha256_by_name


@contextlib.contextmanager
def _reading(source: Path, name: str) -> Iterator[None]:
    """Convert an ``OSError`` while a file of the source is read to ``BadConfig``."""
    try:
        yield
    except OSError as error:
        cannot_read = unreadable(source / name, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise _corrupt(source, name, error.strerror or "cannot be read") from error


def _corrupt(source: Path, name: str, problem: str) -> BadConfig:
    """Return the error for a file of the source that has a problem."""
    return BadConfig(
        f"{source / name}: {problem}",
        next_step=(
            "The source is corrupt or was modified meanwhile. Find all faults: autotune"
            f" data verify {source}"
        ),
    )


def is_intact(directory: Path, manifest: Manifest) -> bool:
    """Return whether a directory has a complete copy of a dataset.

    It has the same manifest and tokenizer, and shards of the right size.
    """
    try:
        if read_manifest(directory) != manifest:
            return False
        for shard in (*manifest.train.shards, *manifest.validation.shards):
            _check_array(
                directory / shard.tokens_file, np.dtype(manifest.dtype), shard.tokens
            )
            _check_array(
                directory / shard.offsets_file, np.dtype("uint64"), shard.samples + 1
            )
        with (directory / TOKENIZER_NAME).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except (BadConfig, OSError):
        return False
    return sha256 == manifest.tokenizer_sha256


def _check_array(path: Path, dtype: np.dtype[Any], length: int) -> None:
    """Raise ``BadConfig`` unless a file is an array of that type and length."""
    # Closed at once, as a large dataset may exceed the limit on open files.
    fd, _ = open_npy(path, dtype, length)
    os.close(fd)


def copy_files(
    files: Sequence[DatasetFile],
    source: Path,
    target: Path,
    manifest: Manifest,
    update: Update,
) -> CopyFigures:
    """Copy a dataset into an empty directory, verify its hashes, and sync it to disk.

    Args:
        files: Files of the dataset.
        source: Directory to copy from.
        target: Directory to copy to.
        manifest: Manifest of the source.
        update: Progress callback, in bytes.

    Raises:
        BadConfig: If a file cannot be read or does not match the manifest.
        OSError: If writing fails.
    """
    started_s = time.perf_counter()
    progress = _CopyProgress(sum(file.size_bytes for file in files), update)
    times = run_in_threads(
        lambda file: _copy_file(file, source, target, progress),
        files,
        _THREADS,
        stop=progress.stop,
    )
    if read_manifest(target) != manifest:
        raise _corrupt(source, MANIFEST_NAME, "changed while it was copied")
    sync(target)
    return CopyFigures(
        size_bytes=progress.total_bytes,
        seconds=time.perf_counter() - started_s,
        read_s=sum(file_times.read_s for file_times in times),
        write_s=sum(file_times.write_s for file_times in times),
    )


class _CopyProgress:
    """Progress that all copying threads report, and their signal to stop."""

    def __init__(self, total_bytes: int, update: Update) -> None:
        self.total_bytes = total_bytes
        self._update = update
        self._copied_bytes = 0
        self._started_s = time.perf_counter()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def add(self, chunk_bytes: int) -> None:
        """Count a chunk that was written, and show the progress."""
        with self._lock:
            self._copied_bytes += chunk_bytes
            elapsed_s = max(1e-9, time.perf_counter() - self._started_s)
            note = f"{self._copied_bytes / elapsed_s / 2**20:,.0f} MiB/s"
            self._update(self._copied_bytes, self.total_bytes, note)

    def stop(self) -> None:
        """Let all threads stop after their current chunk."""
        self._stopped.set()

    @property
    def is_stopped(self) -> bool:
        """True if threads should stop."""
        return self._stopped.is_set()


@dataclass(slots=True, kw_only=True)
class _FileTimes:
    """Seconds that copying one file has spent in reading and in writing."""

    read_s: float = 0.0
    write_s: float = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Add the duration of the block to the time of reading."""
        began_s = time.perf_counter()
        yield
        self.read_s += time.perf_counter() - began_s

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Add the duration of the block to the time of writing."""
        began_s = time.perf_counter()
        yield
        self.write_s += time.perf_counter() - began_s


def _copy_file(
    file: DatasetFile, source: Path, target: Path, progress: _CopyProgress
) -> _FileTimes:
    """Copy one file, unless all threads are stopped meanwhile.

    Raises:
        BadConfig: If it cannot be read, or its size or hash is not that of ``file``.
        OSError: If it cannot be written.
    """
    times = _FileTimes()
    sha256 = hashlib.sha256()
    size_bytes = 0
    with (
        _open_source(source, file.name) as reader,
        (target / file.name).open("xb", buffering=0) as writer,
    ):
        while True:
            with times.reading(), _reading(source, file.name):
                chunk = reader.read(_CHUNK_BYTES)
            if not chunk:
                break
            size_bytes += len(chunk)
            if size_bytes > file.size_bytes:
                raise _corrupt(source, file.name, "became longer while it was copied")
            sha256.update(chunk)
            with times.writing():
                _write_all(writer, chunk)
            progress.add(len(chunk))
            if progress.is_stopped:
                return times
        with times.writing():
            os.fsync(writer.fileno())
    if file.sha256 is not None and file.sha256 != sha256.hexdigest():
        raise _corrupt(
            source,
            file.name,
            f"its SHA-256 is {sha256.hexdigest()[:16]}…, not {file.sha256[:16]}…",
        )
    if size_bytes != file.size_bytes:
        raise _corrupt(source, file.name, "became shorter while it was copied")
    return times


def _open_source(source: Path, name: str) -> FileIO:
    """Open a file of the source for unbuffered reading.

    A symbolic link is an error, as a dataset from elsewhere must not point outside its
    own directory.
    """
    with _reading(source, name):
        fd = os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return os.fdopen(fd, "rb", buffering=0)


def _write_all(writer: FileIO, chunk: bytes) -> None:
    """Write all of a chunk, as a system call may write only a part."""
    unwritten = memoryview(chunk)
    while unwritten:
        unwritten = unwritten[writer.write(unwritten) :]
