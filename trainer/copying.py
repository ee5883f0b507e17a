"""Copy a dataset's files, hashing them on the way, and measure what reading from either side takes. No torch here."""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    read_manifest,
)
from trainer.errors import BadConfig
from trainer.permutation import permute

Update = Callable[[float, float | None, str], None]

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
        BadConfig: If a file is missing.
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
            size_bytes = (source / name).lstat().st_size
        except OSError as error:
            raise _damaged(source, name, error.strerror or "cannot be read") from error
        files.append(DatasetFile(name=name, size_bytes=size_bytes, sha256=sha256))
    return files


def is_whole(directory: Path, manifest: Manifest) -> bool:
    """Whether a copy is there: the same manifest, and every file of its size."""
    if not (directory / MANIFEST_NAME).is_file():
        return False
    try:
        if read_manifest(directory) != manifest:
            return False
        TokenDataset(directory, manifest).close()
        TokenDataset(directory, manifest, "validation").close()
        with (directory / TOKENIZER_NAME).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == manifest.tokenizer_sha256
    except (BadConfig, OSError):
        return False


def copy_files(files: list[DatasetFile], source: Path, target: Path, update: Update) -> CopyFigures:
    """Copy files into an empty directory; everything is on disk when this returns.

    Raises:
        BadConfig: If a file cannot be read, or is not what the manifest says.
        OSError: If the target cannot be written.
    """
    total_bytes = sum(file.size_bytes for file in files)
    started_s = time.perf_counter()
    progress = _Progress(update, total_bytes)
    with ThreadPoolExecutor(_THREADS) as pool:
        running = [pool.submit(_copy, file, source, target, progress) for file in files]
        try:
            taken = [future.result() for future in running]
        except BaseException:
            progress.stop = True
            raise
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return CopyFigures(
        size_bytes=total_bytes,
        seconds=time.perf_counter() - started_s,
        read_s=sum(read_s for read_s, _ in taken),
        write_s=sum(write_s for _, write_s in taken),
    )


class _Progress:
    """What the threads have copied; a sum that is a little behind does no harm."""

    def __init__(self, update: Update, total_bytes: int) -> None:
        self._update, self._total_bytes = update, total_bytes
        self._done_bytes = 0
        self._started_s = time.perf_counter()
        self.stop = False

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        rate = self._done_bytes / max(1e-9, time.perf_counter() - self._started_s) / 2**20
        self._update(self._done_bytes, self._total_bytes, f"{rate:,.0f} MiB/s")


def _copy(file: DatasetFile, source: Path, target: Path, progress: _Progress) -> tuple[float, float]:
    """Copy one file; returns seconds of reading and of writing."""
    path = source / file.name
    hashed = hashlib.sha256()
    read_s = write_s = 0.0
    try:
        # O_NOFOLLOW: a dataset from elsewhere must not point outside its own directory.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _damaged(source, file.name, error.strerror or "cannot be read") from error
    with os.fdopen(fd, "rb", buffering=0) as reader, (target / file.name).open("xb", buffering=0) as writer:
        copied = 0
        while not progress.stop:
            begun_s = time.perf_counter()
            try:
                chunk = reader.read(_CHUNK_BYTES)
            except OSError as error:
                raise _damaged(source, file.name, error.strerror or "cannot be read") from error
            read_s += time.perf_counter() - begun_s
            if not chunk:
                break
            hashed.update(chunk)
            begun_s = time.perf_counter()
            left = memoryview(chunk)
            while left:
                left = left[writer.write(left) :]
            write_s += time.perf_counter() - begun_s
            copied += len(chunk)
            progress.add(len(chunk))
        begun_s = time.perf_counter()
        os.fsync(writer.fileno())
        write_s += time.perf_counter() - begun_s
    if not progress.stop and file.sha256 not in (None, hashed.hexdigest()):
        raise _damaged(source, file.name, f"its SHA-256 is {hashed.hexdigest()[:16]}…, not {str(file.sha256)[:16]}…")
    return read_s, write_s


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


def _damaged(source: Path, name: str, what: str) -> BadConfig:
    return BadConfig(
        f"{source / name}: {what}",
        next_step=f"The source is damaged, or changed while it was copied: autotune data verify {source}",
    )
