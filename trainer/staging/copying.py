"""Copying of a dataset with hash checks, and read times of source and copy.

No torch here.
"""

import contextlib
import hashlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainer.data import dataset as disk
from trainer.data.batch_plan import permute
from trainer.data.dataset import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    TokenDataset,
    read_manifest,
)
from trainer.errors import BadConfig
from trainer.files import sync
from trainer.record.progress import Update

Item = TypeVar("Item")
Result = TypeVar("Result")

_LOOK_EVERY_S = 0.005
_CHUNK_BYTES = 8 * 2**20
_THREADS = 4
"""Number of files copied at once: one reader gets a fraction of a parallel file
system's bandwidth."""
_MEASURED_SAMPLES = 512
_MEASURED_TOKENS = 512


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    *,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run ``work`` on each item in threads, and return the results in the order of the items.

    ``stop`` is called on the first error and on Ctrl-C, to end running work early. The
    first error is raised when all have ended. Signals are blocked while the main thread
    uses the executor, as Ctrl-C could leave its locks taken.
    """
    errors: list[BaseException] = []
    results: dict[int, Result] = {}

    def run(number: int, item: Item) -> None:
        try:
            if not errors:
                results[number] = work(item)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            errors.append(error)

    executor = ThreadPoolExecutor(threads)
    try:
        with _signals_later():
            for number, item in enumerate(items):
                executor.submit(run, number, item)
        while len(results) < len(items) and not errors:
            time.sleep(_LOOK_EVERY_S)
    finally:
        if len(results) < len(items):
            stop()
        with _signals_later():
            executor.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Block SIGINT and SIGTERM until the end of the block.

    Threads started in it never receive them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """File to copy; ``sha256`` is None if the manifest has no hash of it."""

    name: str
    size_bytes: int
    sha256: str | None


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
    """Return a dataset's files, the manifest last.

    Raises:
        BadConfig: If one is missing or not a regular file.
    """
    hashes: dict[str, str | None] = {}
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        hashes |= {
            shard.tokens_file: shard.tokens_sha256,
            shard.offsets_file: shard.offsets_sha256,
        }
    hashes[TOKENIZER_NAME] = manifest.tokenizer_sha256
    hashes |= {
        name: None
        for name in (disk.REJECTS_NAME, disk.PREPARED_NAME)
        if (source / name).is_file()
    }
    hashes[MANIFEST_NAME] = None
    files = []
    for name, sha256 in hashes.items():
        with _reading(source, name):
            status = (source / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise _corrupt(source, name, "is not a regular file")
        files.append(DatasetFile(name=name, size_bytes=status.st_size, sha256=sha256))
    return files


@contextlib.contextmanager
def _reading(source: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _corrupt(source, name, error.strerror or "cannot be read") from error


def is_intact(directory: Path, manifest: Manifest) -> bool:
    """Return whether a directory has a complete copy: the same manifest and tokenizer, and shards of the right size."""
    try:
        if read_manifest(directory) != manifest:
            return False
        for shard in (*manifest.train.shards, *manifest.validation.shards):
            # One at a time, as a large dataset may exceed the limit on open files.
            os.close(
                disk.open_npy(
                    directory / shard.tokens_file,
                    np.dtype(manifest.dtype),
                    shard.tokens,
                )[0]
            )
            os.close(
                disk.open_npy(
                    directory / shard.offsets_file,
                    np.dtype("uint64"),
                    shard.samples + 1,
                )[0]
            )
        with (directory / TOKENIZER_NAME).open("rb") as file:
            return (
                hashlib.file_digest(file, "sha256").hexdigest()
                == manifest.tokenizer_sha256
            )
    except (BadConfig, OSError):
        return False


def copy_files(
    files: Sequence[DatasetFile],
    source: Path,
    target: Path,
    manifest: Manifest,
    update: Update,
) -> CopyFigures:
    """Copy a dataset's files into an empty directory, verify their hashes, and sync them to disk.

    Raises ``BadConfig`` if a file cannot be read or does not match the manifest,
    ``OSError`` if writing fails.
    """
    total_bytes, done_bytes = sum(file.size_bytes for file in files), 0
    started_s = time.perf_counter()
    stop, lock = threading.Event(), threading.Lock()

    def copied(size_bytes: int) -> bool:
        nonlocal done_bytes
        with lock:
            done_bytes += size_bytes
            rate = done_bytes / max(1e-9, time.perf_counter() - started_s) / 2**20
            update(done_bytes, total_bytes, f"{rate:,.0f} MiB/s")
        return stop.is_set()

    taken = in_threads(
        lambda file: _copy(file, source, target, copied), files, _THREADS, stop=stop.set
    )
    if read_manifest(target) != manifest:
        raise _corrupt(source, MANIFEST_NAME, "changed while it was copied")
    sync(target)
    seconds, (read_s, write_s) = (
        time.perf_counter() - started_s,
        map(sum, zip(*taken, strict=True)),
    )
    return CopyFigures(
        size_bytes=total_bytes, seconds=seconds, read_s=read_s, write_s=write_s
    )


def _copy(
    file: DatasetFile, source: Path, target: Path, copied: Callable[[int], bool]
) -> tuple[float, float]:
    """Copy one file, unless ``copied`` returns True to stop.

    Return the seconds of reading and of writing.
    """
    hashed = hashlib.sha256()
    read_s = write_s = 0.0
    size_bytes = 0
    with contextlib.ExitStack() as opened:
        with _reading(source, file.name):
            # O_NOFOLLOW: a dataset from elsewhere must not point outside its own
            # directory.
            fd = os.open(source / file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        reader = opened.enter_context(os.fdopen(fd, "rb", buffering=0))
        writer = opened.enter_context((target / file.name).open("xb", buffering=0))
        while True:
            begun_s = time.perf_counter()
            with _reading(source, file.name):
                chunk = reader.read(_CHUNK_BYTES)
            read_s += time.perf_counter() - begun_s
            if not chunk:
                break
            size_bytes += len(chunk)
            if size_bytes > file.size_bytes:
                raise _corrupt(source, file.name, "became longer while it was copied")
            hashed.update(chunk)
            begun_s, left = time.perf_counter(), memoryview(chunk)
            while left:
                left = left[writer.write(left) :]
            write_s += time.perf_counter() - begun_s
            if copied(len(chunk)):
                return read_s, write_s
        begun_s = time.perf_counter()
        os.fsync(writer.fileno())
        write_s += time.perf_counter() - begun_s
    sha256 = hashed.hexdigest()
    if file.sha256 not in (None, sha256):
        raise _corrupt(
            source,
            file.name,
            f"its SHA-256 is {sha256[:16]}…, not {str(file.sha256)[:16]}…",
        )
    if size_bytes != file.size_bytes:
        raise _corrupt(source, file.name, "became shorter while it was copied")
    return read_s, write_s


def seconds_per_sample(directory: Path) -> float | None:
    """Return the mean time to read some random samples, always the same, with a cold page cache; None without any."""
    with contextlib.closing(TokenDataset.open(directory)) as dataset:
        count = min(_MEASURED_SAMPLES, len(dataset))
        if not count:
            return None
        samples = permute(np.arange(count, dtype=np.uint64), len(dataset), 1, 0).astype(
            np.int64
        )
        dataset.drop_page_cache()
        started_s = time.perf_counter()
        for sample in samples.tolist():
            dataset.read(sample, _MEASURED_TOKENS)
        return (time.perf_counter() - started_s) / count


def _corrupt(source: Path, name: str, what: str) -> BadConfig:
    next_step = (
        "The source is corrupt or was modified meanwhile. Find all faults: autotune"
        f" data verify {source}"
    )
    return BadConfig(f"{source / name}: {what}", next_step=next_step)
