"""Text of samples between extraction and encoding.

It lies in pieces of a size that any process can hold. A piece is two files: ``.text``,
the UTF-8 of its samples one after the other, and ``.index``, a record per sample.

To find duplicates, each piece's digests are sorted once (``.sorted``; ``.prefix`` has
the position at which each range begins). A bucket is a range of digests: its share of a
piece is one read, and a process holds one bucket at a time.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from autotune.corpus.workplace import Receipt, Workplace
from trainer.formats.files import write_atomically

EXTRACT, DISTINCT = "extract-samples", "find-duplicates"
PIECE_TEXT_BYTES = 32 * 2**20
PIECE_SAMPLES = 2**20
"""Limits of a piece: the first sample that reaches one of the two closes it."""
_PREFIX_BITS = 12
MAX_BUCKETS = 1 << _PREFIX_BITS
_BUCKET_SAMPLES = 2**21
"""Samples per bucket, about 150 MB while they are compared."""
_PIECES_FILE = "pieces.json"

INDEX = np.dtype([("bytes", "<u4"), ("digest", "u1", 16)])
"""Record of a sample: bytes of its UTF-8, and its 16-byte BLAKE2b hash, by which
duplicates are found."""
_SORTED = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u4")])
Index = npt.NDArray[np.void]
Bools = npt.NDArray[np.bool_]


def digest(content: bytes) -> bytes:
    """Return the hash that identifies a sample."""
    return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecePaths:
    """The files of a piece."""

    directory: Path
    number: int

    def file(self, kind: str) -> Path:
        """Return the path of the file of a kind, such as ``text``."""
        return self.directory / f"{self.number:04d}.{kind}"

    def read_index(self) -> Index:
        """Read the records of the index; shape (samples,)."""
        return np.fromfile(self.file("index"), dtype=INDEX)

    def read_samples(self, kept: Bools) -> Iterator[str]:
        """Yield the samples that are marked in ``kept``, shape (samples,), in order."""
        lengths: npt.NDArray[Any] = self.read_index()["bytes"].astype(np.int64)
        ends = np.cumsum(lengths)
        with self.file("text").open("rb") as file:
            for begin, length in zip(
                (ends - lengths)[kept].tolist(), lengths[kept].tolist(), strict=True
            ):
                file.seek(begin)
                yield file.read(length).decode()

    def sort_digests(self) -> None:
        """Write the digests in ascending order.

        The position at which each prefix begins is written as well.
        """
        words = (
            np.ascontiguousarray(self.read_index()["digest"])
            .view(">u8")
            .astype(np.uint64)
        )
        order = np.lexsort((words[:, 1], words[:, 0]))
        records = np.empty(len(words), dtype=_SORTED)
        records["high"], records["low"], records["number"] = (
            words[order, 0],
            words[order, 1],
            order,
        )
        self.file("sorted").write_bytes(records.tobytes())
        prefixes = records["high"] >> np.uint64(64 - _PREFIX_BITS)
        edges = np.searchsorted(prefixes, np.arange(MAX_BUCKETS + 1)).astype("<u4")
        self.file("prefix").write_bytes(edges.tobytes())


class PieceWriter:
    """Writer that appends samples to the pieces of a directory.

    It begins the next piece when one is full.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self._directory, self.number = directory, number
        self._open()

    def add(self, content: bytes, name: bytes) -> None:
        """Append one sample with its digest."""
        if (
            self._text.tell() >= PIECE_TEXT_BYTES
            or self._index.tell() >= PIECE_SAMPLES * INDEX.itemsize
        ):
            self.close()
            self.number += 1
            self._open()
        self._text.write(content)
        self._index.write(len(content).to_bytes(4, "little") + name)

    def _open(self) -> None:
        paths = PiecePaths(directory=self._directory, number=self.number)
        self._text: BinaryIO = paths.file("text").open("ab")
        self._index: BinaryIO = paths.file("index").open("ab")

    def close(self) -> None:
        """Flush and close the files."""
        self._text.close()
        self._index.close()


def file_sizes(directory: Path) -> dict[str, int]:
    """Return the sizes of a directory's files, for ``take_back``."""
    return {entry.name: entry.stat().st_size for entry in os.scandir(directory)}


def take_back(directory: Path, sizes: Mapping[str, int]) -> None:
    """Undo what was appended and added since ``file_sizes`` was called."""
    for path in directory.iterdir():
        if path.name in sizes:
            os.truncate(path, sizes[path.name])
        else:
            path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of a preparation."""

    partition: int
    number: int
    """Number of the piece within its partition."""
    samples: int
    """Number of samples that are used; a limit on all samples may end within a
    piece."""
    text_bytes: int

    def paths(self, workplace: Workplace) -> PiecePaths:
        """Return the paths of its files."""
        return PiecePaths(
            directory=workplace.directory(EXTRACT, self.partition), number=self.number
        )


def pieces_of(partition: int, receipt: Receipt) -> list[Piece]:
    """Return the pieces of an extracted partition, in reading order."""
    sizes = zip(receipt["samples"], receipt["text_bytes"], strict=True)
    return [
        Piece(partition=partition, number=n, samples=held, text_bytes=size)
        for n, (held, size) in enumerate(sizes)
    ]


def write_pieces(workplace: Workplace, pieces: list[Piece]) -> None:
    """Write the list of pieces for the tasks to read.

    It is too large to send with each task.
    """
    write_atomically(
        workplace.path / _PIECES_FILE,
        json.dumps([asdict(piece) for piece in pieces]),
        durable=False,
    )


def read_pieces(workplace: Workplace) -> list[Piece]:
    """Read the list of pieces, in reading order."""
    return [
        Piece(**fields)
        for fields in json.loads((workplace.path / _PIECES_FILE).read_bytes())
    ]


class FirstDistinct:
    """Count of distinct samples in reading order, up to ``most``.

    Partitions may finish in any order.
    """

    def __init__(self, workplace: Workplace, most: int) -> None:
        self._workplace, self._most = workplace, most
        self._waiting: dict[int, Receipt] = {}
        self._seen: set[bytes] = set()
        self.pieces: list[Piece] = []
        """Pieces used so far; the last one ends at the last sample wanted."""
        self.partitions = 0
        """Number of partitions that these pieces come from."""

    @property
    def reached(self) -> bool:
        """True if there are enough samples."""
        return len(self._seen) >= self._most

    def add(self, partition: int, receipt: Receipt) -> None:
        """Record a finished partition, by its number in reading order."""
        self._waiting[partition] = receipt
        while not self.reached and self.partitions in self._waiting:
            for piece in pieces_of(self.partitions, self._waiting.pop(self.partitions)):
                if self.reached:
                    break
                taken, digests = 0, piece.paths(self._workplace).read_index()["digest"]
                while taken < len(digests) and not self.reached:
                    self._seen.add(digests[taken].tobytes())
                    taken += 1
                self.pieces.append(replace(piece, samples=taken))
            self.partitions += 1


def buckets_for(samples: int) -> int:
    """Return the number of buckets at which each fits the memory of a process.

    It is a power of two.
    """
    return min(MAX_BUCKETS, power_of_two(samples / _BUCKET_SAMPLES))


def power_of_two(least: float) -> int:
    """Return the smallest power of two that is at least ``least``."""
    return 1 << max(0, math.ceil(least) - 1).bit_length()


def find_duplicates(
    workplace: Workplace, directory: Path, *, bucket: int, buckets: int
) -> Receipt:
    """Find the duplicates in a bucket, and write them by piece.

    Of equal samples, all but the first in reading order are duplicates.
    """
    pieces, parts, step = read_pieces(workplace), list[Index](), MAX_BUCKETS // buckets
    for piece in pieces:
        paths = piece.paths(workplace)
        prefixes = np.fromfile(paths.file("prefix"), dtype="<u4")
        first, end = int(prefixes[bucket * step]), int(prefixes[(bucket + 1) * step])
        part = _numbers(paths.file("sorted"), _SORTED, first, end - first)
        parts.append(part[part["number"] < piece.samples])
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    records = np.concatenate([*parts, np.empty(0, dtype=_SORTED)])
    order = np.lexsort((records["number"], owner, records["low"], records["high"]))
    records, owner = records[order], owner[order]
    again = np.zeros(len(records), dtype=bool)
    again[1:] = (records["high"][1:] == records["high"][:-1]) & (
        records["low"][1:] == records["low"][:-1]
    )
    dropped, owner = records["number"][again], owner[again]
    by_piece = np.lexsort((dropped, owner))
    edges = np.searchsorted(owner[by_piece], np.arange(len(pieces) + 1)).astype("<u8")
    # Not numpy's writer, whose error hides a full disk.
    (directory / "numbers").write_bytes(dropped[by_piece].astype("<u4").tobytes())
    (directory / "pieces").write_bytes(edges.tobytes())
    return {"duplicates": len(dropped)}


def _numbers(path: Path, dtype: Any, first: int, count: int) -> npt.NDArray[Any]:
    return np.fromfile(
        path, dtype=dtype, count=count, offset=first * np.dtype(dtype).itemsize
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rule by which the samples of a piece are used or held out; sent to tasks."""

    buckets: int
    """Number of buckets that were compared; 0 keeps duplicates."""
    validation_share: float
    """Share of samples to hold out, by a hash of their content: the same on every
    machine, even if data is added."""
    seed: int

    def of(self, workplace: Workplace, number: int) -> tuple[PiecePaths, Bools, Bools]:
        """Return a piece by its number, with its training and validation samples.

        The samples are masks of shape (samples,), up to the piece's limit.
        """
        piece = read_pieces(workplace)[number]
        paths = piece.paths(workplace)
        index = paths.read_index()
        kept = np.arange(len(index)) < piece.samples
        for bucket in range(self.buckets):
            directory = workplace.directory(DISTINCT, bucket)
            first, end = _numbers(directory / "pieces", "<u8", number, 2).tolist()
            kept[_numbers(directory / "numbers", "<u4", first, end - first)] = False
        validation = drawn(index, self.validation_share, f"validation {self.seed}")
        return paths, kept & ~validation, kept & validation


def drawn(index: Index, share: float, purpose: str) -> Bools:
    """Return a mask of the samples in a random share, shape (samples,).

    The draw is seeded by ``purpose`` and the samples' content.
    """
    key = hashlib.blake2b(purpose.encode(), digest_size=32).digest()
    below = int(share * 2**64)
    hashes = (
        hashlib.blake2b(name.tobytes(), digest_size=8, key=key).digest()
        for name in index["digest"]
    )
    return np.fromiter(
        (int.from_bytes(word) < below for word in hashes), dtype=bool, count=len(index)
    )
