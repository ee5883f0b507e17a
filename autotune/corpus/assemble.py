"""Encoded pieces to the shards of a dataset."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from autotune.corpus.encode import STAGE as ENCODE_STAGE
from autotune.corpus.words import piece_name
from autotune.corpus.workplace import Receipt, UnfinishedTask, Workplace
from autotune.errors import InternalError
from trainer.dataset import Shard
from trainer.disk import sync

STAGE = "assemble"
# 512 MiB of uint16: few enough files for any number of samples, and small enough to copy and check in parallel.
SHARD_TOKENS = 2**28
SHARD_SAMPLES = 2**24
_HEADER_BYTES = 128
_COPY_BYTES = 2**22
_LENGTHS_AT_ONCE = 2**20


def shard_edges(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Which pieces make a shard: first, and one behind the last. Pieces stay whole, and a shard within its bounds.

    Args:
        sizes: Samples and tokens of each piece; one that is larger than a shard may be has one of its own.
    """
    edges: list[tuple[int, int]] = []
    first = samples = tokens = 0
    for number, (more_samples, more_tokens) in enumerate(sizes):
        if samples and (samples + more_samples > SHARD_SAMPLES or tokens + more_tokens > SHARD_TOKENS):
            edges.append((first, number))
            first = number
            samples = tokens = 0
        samples, tokens = samples + more_samples, tokens + more_tokens
    if samples:
        edges.append((first, len(sizes)))
    return edges


def assemble_shard(
    workplace: Workplace,
    task: UnfinishedTask,
    *,
    split: str,
    shard: int,
    pieces: tuple[int, int],
    samples: int,
    tokens: int,
    dtype: str,
) -> Receipt:
    """Join the pieces of a shard into its two files."""
    sources = [workplace.directory(ENCODE_STAGE, piece_name(number)) for number in range(*pieces)]
    names = {kind: f"{split}-{kind}-{shard:05d}.npy" for kind in ("tokens", "offsets")}
    with _HashedFile(task.directory / names["tokens"]) as file:
        file.write(npy_header(np.dtype(dtype), tokens))
        for source in sources:
            file.copy(source / f"{split}.ids")
        tokens_sha256 = file.sha256
    with _HashedFile(task.directory / names["offsets"]) as file:
        file.write(npy_header(np.dtype("<u8"), samples + 1))
        file.write(bytes(8))
        end = np.uint64(0)
        for lengths in _lengths(sources, split):
            ends = end + np.cumsum(lengths, dtype="<u8")
            file.write(ends.tobytes())
            end = ends[-1]
        offsets_sha256 = file.sha256
    return Shard(
        tokens_file=names["tokens"],
        offsets_file=names["offsets"],
        samples=samples,
        tokens=tokens,
        tokens_sha256=tokens_sha256,
        offsets_sha256=offsets_sha256,
    ).model_dump()


def gather(workplace: Workplace, task: str, shard: Shard, dataset: Path) -> None:
    """Move a shard's files to the dataset; those that an earlier run moved are there.

    Raises:
        InternalError: If a file is in neither place.
    """
    directory = workplace.directory(STAGE, task)
    for name in (shard.tokens_file, shard.offsets_file):
        if (directory / name).exists():
            (directory / name).rename(dataset / name)
        if not (dataset / name).exists():
            raise InternalError(
                f"{name} is gone from {directory}", next_step=f"Remove {workplace.path} and start again."
            )


def npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    """The header of a one-dimensional ``.npy`` file of little-endian numbers, always of the same size."""
    text = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': ({length},), }}"
    padded_bytes = _HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + padded_bytes.to_bytes(2, "little") + text.ljust(padded_bytes - 1).encode() + b"\n"


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, replacing one of an earlier run, and wait until the disk has it."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.rename(path)


class _HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("xb", buffering=2**20)
        self._hash = hashlib.sha256()

    def write(self, content: bytes) -> None:
        """Append bytes."""
        self._hash.update(content)
        self._file.write(content)

    def copy(self, source: Path) -> None:
        """Append a file's content."""
        with source.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while content := file.read(_COPY_BYTES):
                self.write(content)

    @property
    def sha256(self) -> str:
        """Of what was written."""
        return self._hash.hexdigest()

    def __enter__(self) -> "_HashedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _lengths(sources: Sequence[Path], split: str) -> Iterator[Any]:
    for source in sources:
        with (source / f"{split}.lengths").open("rb") as file:
            while len(lengths := np.fromfile(file, dtype="<u4", count=_LENGTHS_AT_ONCE)):
                yield lengths
