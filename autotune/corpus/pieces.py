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

# Stages of a preparation.
EXTRACT = "extract-samples"
DISTINCT = "find-duplicates"

PIECE_TEXT_BYTES = 32 * 2**20
PIECE_SAMPLES = 2**20
"""Limits of a piece: the first sample that reaches one of the two closes it."""
_PREFIX_BITS = 12
"""Bits at the beginning of a digest by which it belongs to a bucket."""
MAX_BUCKETS = 1 << _PREFIX_BITS
_BUCKET_SAMPLES = 2**21
"""Samples per bucket, about 150 MB while they are compared."""
_PIECES_FILE = "pieces.json"

INDEX = np.dtype([("bytes", "<u4"), ("digest", "u1", 16)])
"""Record of a sample: bytes of its UTF-8, and its 16-byte BLAKE2b hash, by which
duplicates are found."""
_SORTED = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u4")])
"""Record of a sorted digest: its two halves, and the number of its sample."""
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

    def read_samples(self, selected: Bools) -> Iterator[str]:
        """Yield the samples that a mask of shape (samples,) marks, in order."""
        lengths: npt.NDArray[Any] = self.read_index()["bytes"].astype(np.int64)
        begins = np.cumsum(lengths) - lengths
        selected_begins = begins[selected].tolist()
        selected_lengths = lengths[selected].tolist()
        with self.file("text").open("rb") as file:
            for begin, length in zip(selected_begins, selected_lengths, strict=True):
                file.seek(begin)
                yield file.read(length).decode()

    def sort_digests(self) -> None:
        """Write the digests in ascending order.

        The position at which each prefix begins is written as well.
        """
        digests = np.ascontiguousarray(self.read_index()["digest"])
        # Two big-endian halves, which compare as the digests do.
        halves = digests.view(">u8").astype(np.uint64)
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        records = np.empty(len(halves), dtype=_SORTED)
        records["high"] = halves[order, 0]
        records["low"] = halves[order, 1]
        records["number"] = order
        self.file("sorted").write_bytes(records.tobytes())
        prefixes = records["high"] >> np.uint64(64 - _PREFIX_BITS)
        edges = np.searchsorted(prefixes, np.arange(MAX_BUCKETS + 1)).astype("<u4")
        self.file("prefix").write_bytes(edges.tobytes())


class PieceWriter:
    """Writer that appends samples to the pieces of a directory.

    It begins the next piece when one is full.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self._directory = directory
        self.number = number
        self._open()

    def add(self, content: bytes, sample_digest: bytes) -> None:
        """Append one sample with its digest."""
        samples = self._index.tell() // INDEX.itemsize
        if self._text.tell() >= PIECE_TEXT_BYTES or samples >= PIECE_SAMPLES:
            self.close()
            self.number += 1
            self._open()
        self._text.write(content)
        self._index.write(len(content).to_bytes(4, "little") + sample_digest)

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
        Piece(
            partition=partition, number=number, samples=samples, text_bytes=text_bytes
        )
        for number, (samples, text_bytes) in enumerate(sizes)
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
        self._workplace = workplace
        self._most = most
        self._waiting: dict[int, Receipt] = {}
        self._distinct: set[bytes] = set()
        self.pieces: list[Piece] = []
        """Pieces used so far; the last one ends at the last sample wanted."""
        self.partitions = 0
        """Number of partitions that these pieces come from."""

    @property
    def reached(self) -> bool:
        """True if there are enough samples."""
        return len(self._distinct) >= self._most

    def add(self, partition: int, receipt: Receipt) -> None:
        """Record a finished partition, by its number in reading order."""
        self._waiting[partition] = receipt
        while not self.reached and self.partitions in self._waiting:
            for piece in pieces_of(self.partitions, self._waiting.pop(self.partitions)):
                if self.reached:
                    break
                self.pieces.append(self._used_part(piece))
            self.partitions += 1

    def _used_part(self, piece: Piece) -> Piece:
        """Count the samples of a piece; return it up to the last sample wanted."""
        digests = piece.paths(self._workplace).read_index()["digest"]
        used = 0
        while used < len(digests) and not self.reached:
            self._distinct.add(digests[used].tobytes())
            used += 1
        return replace(piece, samples=used)


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
    pieces = read_pieces(workplace)
    # Prefixes of a bucket.
    prefix_count = MAX_BUCKETS // buckets
    records_by_piece: list[Index] = []
    for piece in pieces:
        paths = piece.paths(workplace)
        edges = np.fromfile(paths.file("prefix"), dtype="<u4")
        first = int(edges[bucket * prefix_count])
        end = int(edges[(bucket + 1) * prefix_count])
        piece_records = _read_range(paths.file("sorted"), _SORTED, first, end)
        records_by_piece.append(piece_records[piece_records["number"] < piece.samples])
    records = np.concatenate([*records_by_piece, np.empty(0, dtype=_SORTED)])
    counts = [len(piece_records) for piece_records in records_by_piece]
    piece_of = np.repeat(np.arange(len(pieces)), counts)
    # By digest, and equal samples in reading order.
    order = np.lexsort((records["number"], piece_of, records["low"], records["high"]))
    records = records[order]
    piece_of = piece_of[order]
    is_duplicate = np.zeros(len(records), dtype=bool)
    same_high = records["high"][1:] == records["high"][:-1]
    same_low = records["low"][1:] == records["low"][:-1]
    is_duplicate[1:] = same_high & same_low
    numbers = records["number"][is_duplicate]
    piece_of = piece_of[is_duplicate]
    by_piece = np.lexsort((numbers, piece_of))
    piece_edges = np.searchsorted(piece_of[by_piece], np.arange(len(pieces) + 1))
    # Not numpy's writer, whose error hides a full disk.
    (directory / "numbers").write_bytes(numbers[by_piece].astype("<u4").tobytes())
    (directory / "pieces").write_bytes(piece_edges.astype("<u8").tobytes())
    return {"duplicates": len(numbers)}


def _read_range(path: Path, dtype: Any, first: int, end: int) -> npt.NDArray[Any]:
    """Read records of a file, ``end`` excluded; shape (end - first,)."""
    offset_bytes = first * np.dtype(dtype).itemsize
    return np.fromfile(path, dtype=dtype, count=end - first, offset=offset_bytes)


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
        is_used = np.arange(len(index)) < piece.samples
        for bucket in range(self.buckets):
            directory = workplace.directory(DISTINCT, bucket)
            piece_edges = _read_range(directory / "pieces", "<u8", number, number + 2)
            first, end = piece_edges.tolist()
            duplicates = _read_range(directory / "numbers", "<u4", first, end)
            is_used[duplicates] = False
        is_held_out = drawn(index, self.validation_share, f"validation {self.seed}")
        return paths, is_used & ~is_held_out, is_used & is_held_out


def drawn(index: Index, share: float, purpose: str) -> Bools:
    """Return a mask of the samples in a random share, shape (samples,).

    The draw is seeded by ``purpose`` and the samples' content.
    """
    key = hashlib.blake2b(purpose.encode(), digest_size=32).digest()
    limit = int(share * 2**64)
    draws = (
        hashlib.blake2b(sample_digest.tobytes(), digest_size=8, key=key).digest()
        for sample_digest in index["digest"]
    )
    is_drawn = (int.from_bytes(draw) < limit for draw in draws)
    return np.fromiter(is_drawn, dtype=bool, count=len(index))
