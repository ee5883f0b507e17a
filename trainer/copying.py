"""Copy a dataset's files, hashing them on the way, and measure what reading from either side takes. No torch here."""

import contextlib
import hashlib
import io
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.dataset import (
    MANIFEST_NAME,
    PREPARED_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    Manifest,
    TokenDataset,
    open_npy,
    read_manifest,
)
from trainer.errors import BadConfig
from trainer.permutation import permute
from trainer.progress import Update
from trainer.threads import in_threads

_CHUNK_BYTES = 8 * 2**20
_THREADS = 4
"""Files at once: a parallel file system gives one reader a fraction of what it has."""
_MEASURED_SAMPLES = 512
_MEASURED_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """One file to copy; ``sha256`` is None for one that the manifest does not name."""

    name: str
    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFigures:
    """What a copy took, all threads together.

    Args:
        size_bytes: Bytes copied.
        seconds: Wall time, until everything was on disk.
        read_s: Time spent in reading, added up over threads.
        write_s: Time spent in writing and syncing, added up over threads.
    """

    size_bytes: int
    seconds: float
    read_s: float
    write_s: float

    @property
    def bytes_per_s(self) -> float:
        """Of the copy as a whole."""
        return self.size_bytes / self.seconds

    @property
    def read_bytes_per_s(self) -> float:
        """Of one reading thread."""
        return self.size_bytes / self.read_s

    @property
    def write_bytes_per_s(self) -> float:
        """Of one writing thread, syncing included."""
        return self.size_bytes / self.write_s


def dataset_files(source: Path, manifest: Manifest) -> list[DatasetFile]:
    """What a dataset consists of, the manifest last.

    Raises:
        BadConfig: If a file is missing, or is a link or anything else that is not a file.
    """
    hashes: dict[str, str | None] = {}
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        hashes |= {shard.tokens_file: shard.tokens_sha256, shard.offsets_file: shard.offsets_sha256}
    hashes[TOKENIZER_NAME] = manifest.tokenizer_sha256
    hashes |= {name: None for name in (REJECTS_NAME, PREPARED_NAME) if (source / name).is_file()}
    hashes[MANIFEST_NAME] = None
    files = []
    for name, sha256 in hashes.items():
        try:
            status = (source / name).lstat()
        except OSError as error:
            raise damaged_source(source, name, error.strerror or "cannot be read") from error
        if not stat.S_ISREG(status.st_mode):
            raise damaged_source(source, name, "is not a regular file")
        files.append(DatasetFile(name=name, size_bytes=status.st_size, sha256=sha256))
    return files


def is_whole(directory: Path, manifest: Manifest) -> bool:
    """Whether a copy is there: the same manifest, and every file of its size."""
    if not (directory / MANIFEST_NAME).is_file():
        return False
    try:
        if read_manifest(directory) != manifest:
            return False
        for shard in (*manifest.train.shards, *manifest.validation.shards):
            # One at a time: a process may open fewer files than a large dataset has.
            os.close(open_npy(directory / shard.tokens_file, np.dtype(manifest.dtype), shard.tokens)[0])
            os.close(open_npy(directory / shard.offsets_file, np.dtype("uint64"), shard.samples + 1)[0])
        with (directory / TOKENIZER_NAME).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == manifest.tokenizer_sha256
    except (BadConfig, OSError):
        return False


def copy_files(
    files: Sequence[DatasetFile], source: Path, target: Path, manifest: Manifest, update: Update
) -> CopyFigures:
    """Copy files into an empty directory; everything is on disk when this returns.

    Raises:
        BadConfig: If a file cannot be read, or is not what the manifest says.
        OSError: If the target cannot be written.
    """
    progress = _Progress(update, sum(file.size_bytes for file in files))
    started_s = time.perf_counter()
    taken = in_threads(lambda file: _copy(file, source, target, progress), files, _THREADS, stop=progress.end)
    if read_manifest(target) != manifest:
        raise damaged_source(source, MANIFEST_NAME, "changed while it was copied")
    sync_directory(target)
    return CopyFigures(
        size_bytes=progress.total_bytes,
        seconds=time.perf_counter() - started_s,
        read_s=sum(read_s for read_s, _ in taken),
        write_s=sum(write_s for _, write_s in taken),
    )


def sync_directory(directory: Path) -> None:
    """Put the names in a directory on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Progress:
    """What the threads have copied, and whether they are to stop."""

    def __init__(self, update: Update, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.stop = False
        self._update = update
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._started_s = time.perf_counter()

    def end(self) -> None:
        """Ask all threads to end."""
        self.stop = True

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            rate = self._done_bytes / max(1e-9, time.perf_counter() - self._started_s) / 2**20
            self._update(self._done_bytes, self.total_bytes, f"{rate:,.0f} MiB/s")


def _copy(file: DatasetFile, source: Path, target: Path, progress: _Progress) -> tuple[float, float]:
    """Copy one file; returns seconds of reading and of writing."""
    hashed = hashlib.sha256()
    read_s = write_s = 0.0
    copied_bytes = 0
    with (
        os.fdopen(_open_source(source, file.name), "rb", buffering=0) as reader,
        (target / file.name).open("xb", buffering=0) as writer,
    ):
        while not progress.stop:
            begun_s = time.perf_counter()
            try:
                chunk = reader.read(_CHUNK_BYTES)
            except OSError as error:
                raise damaged_source(source, file.name, error.strerror or "cannot be read") from error
            read_s += time.perf_counter() - begun_s
            if not chunk:
                break
            copied_bytes += len(chunk)
            if copied_bytes > file.size_bytes:
                raise damaged_source(source, file.name, "became longer while it was copied")
            hashed.update(chunk)
            write_s += _write(writer, chunk)
            progress.add(len(chunk))
        begun_s = time.perf_counter()
        os.fsync(writer.fileno())
        write_s += time.perf_counter() - begun_s
    if not progress.stop:
        _check(file, source, copied_bytes, hashed.hexdigest())
    return read_s, write_s


def _open_source(source: Path, name: str) -> int:
    try:
        # O_NOFOLLOW: a dataset from elsewhere must not point outside its own directory.
        return os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise damaged_source(source, name, error.strerror or "cannot be read") from error


def _write(writer: io.FileIO, chunk: bytes) -> float:
    """Write all of it; returns seconds."""
    begun_s = time.perf_counter()
    left = memoryview(chunk)
    while left:
        left = left[writer.write(left) :]
    return time.perf_counter() - begun_s


def _check(file: DatasetFile, source: Path, copied_bytes: int, sha256: str) -> None:
    if file.sha256 not in (None, sha256):
        raise damaged_source(source, file.name, f"its SHA-256 is {sha256[:16]}…, not {str(file.sha256)[:16]}…")
    if copied_bytes != file.size_bytes:
        raise damaged_source(source, file.name, "became shorter while it was copied")


def seconds_per_sample(directory: Path) -> float | None:
    """Mean time of reading one random training sample, as a loader with a cold page cache does; None without samples.

    The samples are the same ones every time, so that two places can be compared.
    """
    with contextlib.closing(TokenDataset.open(directory)) as dataset:
        count = min(_MEASURED_SAMPLES, len(dataset))
        if not count:
            return None
        samples = permute(np.arange(count, dtype=np.uint64), len(dataset), 1, 0).astype(np.int64)
        dataset.forget()
        ids = np.empty(_MEASURED_TOKENS, dtype=dataset.dtype)
        started_s = time.perf_counter()
        for sample in samples:
            shards, begins, tokens = dataset.locate(sample[None])
            dataset.read_into(ids, np.zeros(1, dtype=np.int64), shards, begins, np.minimum(tokens, len(ids)))
        return (time.perf_counter() - started_s) / count


def damaged_source(source: Path, name: str, what: str) -> BadConfig:
    """What is wrong with a file of the source."""
    return BadConfig(
        f"{source / name}: {what}",
        next_step=f"The source is damaged, or changed while it was copied: autotune data verify {source}",
    )
