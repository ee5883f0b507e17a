"""The text of samples between extraction and encoding: pieces, each of a size that any process can hold.

A piece is two files: ``.text``, the UTF-8 of its samples one after the other, and ``.index``, a record per sample.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

PIECE_TEXT_BYTES = 32 * 2**20
PIECE_SAMPLES = 2**20
"""A piece is closed by the first sample that reaches one of these."""

INDEX = np.dtype([("bytes", "<u4"), ("digest", "u1", 16)])
"""Length of a sample's UTF-8, and its BLAKE2b hash of 16 bytes, by which samples are told apart."""
Index = npt.NDArray[np.void]
DIGEST_BYTES = 16


def digest(content: bytes) -> bytes:
    """What names a sample."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecePaths:
    """The two files of a piece."""

    text: Path
    index: Path

    @classmethod
    def of(cls, directory: Path, number: int) -> "PiecePaths":
        """The files of a partition's piece, by number."""
        return cls(text=directory / f"{number:04d}.text", index=directory / f"{number:04d}.index")


class PieceWriter:
    """Appends samples to the pieces of one directory, and begins the next when one is full."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self._directory = directory
        self._open()

    def add(self, content: bytes, name: bytes) -> None:
        """Append one sample with its digest."""
        if self._text.tell() >= PIECE_TEXT_BYTES or self._index.tell() >= PIECE_SAMPLES * INDEX.itemsize:
            self.close()
            self.number += 1
            self._open()
        self._text.write(content)
        self._index.write(len(content).to_bytes(4, "little") + name)

    def _open(self) -> None:
        paths = PiecePaths.of(self._directory, self.number)
        self._text: BinaryIO = paths.text.open("ab")
        self._index: BinaryIO = paths.index.open("ab")

    def close(self) -> None:
        """Flush and close."""
        self._text.close()
        self._index.close()

    def __enter__(self) -> "PieceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def file_sizes(directory: Path) -> dict[str, int]:
    """What a directory holds, to go back to."""
    return {entry.name: entry.stat().st_size for entry in os.scandir(directory)}


def take_back(directory: Path, sizes: Mapping[str, int]) -> None:
    """Undo what was appended and added since ``file_sizes`` was asked."""
    for path in directory.iterdir():
        if path.name in sizes:
            os.truncate(path, sizes[path.name])
        else:
            path.unlink()


def read_index(paths: PiecePaths) -> Index:
    """The records of a piece; shape (samples,)."""
    index: Index = np.fromfile(paths.index, dtype=INDEX)
    return index


def read_samples(paths: PiecePaths, kept: npt.NDArray[np.bool_]) -> Iterator[str]:
    """The samples of a piece that are marked, in order.

    Args:
        paths: The piece.
        kept: Shape (samples,).
    """
    lengths: npt.NDArray[Any] = read_index(paths)["bytes"].astype(np.int64)
    ends = np.cumsum(lengths)
    with paths.text.open("rb") as file:
        for begin, length in zip((ends - lengths)[kept].tolist(), lengths[kept].tolist(), strict=True):
            file.seek(begin)
            yield file.read(length).decode()
