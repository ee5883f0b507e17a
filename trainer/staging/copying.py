"""Copying of a dataset with hash checks, and read times of source and copy."""

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
from typing import Any, TypeVar

import numpy as np

from trainer.data.dataset import TokenDataset
from trainer.data.manifest import (
    MANIFEST_NAME,
    PREPARED_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    Manifest,
    read_manifest,
)
from trainer.data.npy_file import open_npy
from trainer.data.permutation import permute
from trainer.errors import BadConfig, unreadable
from trainer.files import sync
from trainer.record.progress import Update

Item = TypeVar("Item")
Result = TypeVar("Result")

_POLL_S = 0.005
_CHUNK_BYTES = 8 * 2**20
_THREADS = 4
"""Number of files copied at once: one reader gets a fraction of a parallel file
system's bandwidth."""
_MEASURED_SAMPLES = 512
"""Samples whose mean read time is measured."""
_MEASURED_TOKENS = 512
"""Longest part of a sample that is read for it."""


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    *,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run ``work`` on each item in threads.

    The first error is raised when all threads have ended.

    Args:
        work: Function to call with each item.
        items: Arguments.
        threads: Number of threads.
        stop: Callback on the first error and on Ctrl-C, to end running work early.

    Returns:
        The results, in the order of the items.
    """
    errors: list[BaseException] = []
    results: dict[int, Result] = {}

    def run(number: int, item: Item) -> None:
        try:
            if not errors:
                results[number] = work(item)
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            errors.append(error)

    # Signals are blocked while the main thread uses the executor, as Ctrl-C could leave
    # its locks taken. Between polls they are delivered.
    executor = ThreadPoolExecutor(threads)
    try:
        with _blocked_signals():
            for number, item in enumerate(items):
                executor.submit(run, number, item)
        while len(results) < len(items) and not errors:
            time.sleep(_POLL_S)
    finally:
        if len(results) < len(items):
            stop()
        with _blocked_signals():
            executor.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the end of the block.

    Threads started in it never receive them.
    """
    previous_mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


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
    sha256_by_name: dict[str, str | None] = {}
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        sha256_by_name[shard.tokens_file] = shard.tokens_sha256
        sha256_by_name[shard.offsets_file] = shard.offsets_sha256
    sha256_by_name[TOKENIZER_NAME] = manifest.tokenizer_sha256
    for name in (REJECTS_NAME, PREPARED_NAME):
        if (source / name).is_file():
            sha256_by_name[name] = None
    sha256_by_name[MANIFEST_NAME] = None
    files = []
    for name, sha256 in sha256_by_name.items():
        with _reading(source, name):
            status = (source / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise _corrupt(source, name, "is not a regular file")
        files.append(DatasetFile(name=name, size_bytes=status.st_size, sha256=sha256))
    return files


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
    total_bytes = sum(file.size_bytes for file in files)
    copied_bytes = 0
    started_s = time.perf_counter()
    stop = threading.Event()
    lock = threading.Lock()

    def count(chunk_bytes: int) -> bool:
        nonlocal copied_bytes
        with lock:
            copied_bytes += chunk_bytes
            elapsed_s = max(1e-9, time.perf_counter() - started_s)
            note = f"{copied_bytes / elapsed_s / 2**20:,.0f} MiB/s"
            update(copied_bytes, total_bytes, note)
        return stop.is_set()

    times = in_threads(
        lambda file: _copy_file(file, source, target, count),
        files,
        _THREADS,
        stop=stop.set,
    )
    if read_manifest(target) != manifest:
        raise _corrupt(source, MANIFEST_NAME, "changed while it was copied")
    sync(target)
    return CopyFigures(
        size_bytes=total_bytes,
        seconds=time.perf_counter() - started_s,
        read_s=sum(read_s for read_s, _ in times),
        write_s=sum(write_s for _, write_s in times),
    )


def _copy_file(
    file: DatasetFile, source: Path, target: Path, count: Callable[[int], bool]
) -> tuple[float, float]:
    """Copy one file.

    ``count`` is called with the size of each chunk, and returns True to stop.

    Returns:
        The seconds of reading and of writing.
    """
    sha256 = hashlib.sha256()
    read_s = 0.0
    write_s = 0.0
    size_bytes = 0
    with contextlib.ExitStack() as stack:
        with _reading(source, file.name):
            # O_NOFOLLOW: a dataset from elsewhere must not point outside its own
            # directory.
            fd = os.open(source / file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        reader = stack.enter_context(os.fdopen(fd, "rb", buffering=0))
        writer = stack.enter_context((target / file.name).open("xb", buffering=0))
        while True:
            began_s = time.perf_counter()
            with _reading(source, file.name):
                chunk = reader.read(_CHUNK_BYTES)
            read_s += time.perf_counter() - began_s
            if not chunk:
                break
            size_bytes += len(chunk)
            if size_bytes > file.size_bytes:
                raise _corrupt(source, file.name, "became longer while it was copied")
            sha256.update(chunk)
            began_s = time.perf_counter()
            unwritten = memoryview(chunk)
            while unwritten:
                unwritten = unwritten[writer.write(unwritten) :]
            write_s += time.perf_counter() - began_s
            if count(len(chunk)):
                return read_s, write_s
        began_s = time.perf_counter()
        os.fsync(writer.fileno())
        write_s += time.perf_counter() - began_s
    if file.sha256 is not None and file.sha256 != sha256.hexdigest():
        raise _corrupt(
            source,
            file.name,
            f"its SHA-256 is {sha256.hexdigest()[:16]}…, not {file.sha256[:16]}…",
        )
    if size_bytes != file.size_bytes:
        raise _corrupt(source, file.name, "became shorter while it was copied")
    return read_s, write_s


def seconds_per_sample(directory: Path) -> float | None:
    """Measure the mean time to read a sample, with a cold page cache, in seconds.

    The samples are random, but always the same.

    Returns:
        None if there are no samples.
    """
    with contextlib.closing(TokenDataset.open(directory)) as dataset:
        count = min(_MEASURED_SAMPLES, len(dataset))
        if not count:
            return None
        indices = np.arange(count, dtype=np.uint64)
        samples = permute(indices, len(dataset), 1, 0).astype(np.int64)
        dataset.drop_page_cache()
        started_s = time.perf_counter()
        for sample in samples.tolist():
            dataset.read(sample, _MEASURED_TOKENS)
        return (time.perf_counter() - started_s) / count
