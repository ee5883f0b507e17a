"""Which samples are there already: the digests of all pieces, sorted and compared bucket by bucket.

A bucket is a range of digests. Each piece's digests are sorted once, so that a bucket's share of a piece is one read,
and no process ever holds more than a bucket.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.corpus.pieces import Index, PiecePaths, read_index
from autotune.corpus.workplace import Receipt, UnfinishedTask, Workplace

STAGE = "distinct"
_EXTRACT_STAGE = "extract"
_PREFIX_BITS = 12
MAX_BUCKETS = 2**_PREFIX_BITS
_BUCKET_SAMPLES = 2**21
"""About 150 MB while they are compared."""

_SORTED = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u4")])
_PIECES_FILE = "pieces.json"

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of all, in reading order.

    Args:
        task: The extraction that wrote it.
        number: Its number there.
        samples: How many of its samples count; a limit on all samples may end within a piece.
        text_bytes: Size of its text.
    """

    task: str
    number: int
    samples: int
    text_bytes: int

    def paths(self, workplace: Workplace) -> PiecePaths:
        """Its files."""
        return PiecePaths.of(workplace.directory(_EXTRACT_STAGE, self.task), self.number)


def write_pieces(workplace: Workplace, pieces: list[Piece]) -> None:
    """Leave the list of pieces to the tasks: sent with each, it would outgrow what they do."""
    path = workplace.path / _PIECES_FILE
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps([[p.task, p.number, p.samples, p.text_bytes] for p in pieces]))
    temporary.rename(path)


def read_pieces(workplace: Workplace) -> list[Piece]:
    """The pieces, in reading order."""
    rows = json.loads((workplace.path / _PIECES_FILE).read_bytes())
    return [Piece(task=task, number=number, samples=samples, text_bytes=size) for task, number, samples, size in rows]


def sort_digests(paths: PiecePaths) -> None:
    """Write a piece's digests in order, and where each prefix begins."""
    index = read_index(paths)
    high, low = _words(index)
    order = np.lexsort((low, high))
    records = np.empty(len(index), dtype=_SORTED)
    records["high"], records["low"], records["number"] = high[order], low[order], order
    _sorted_path(paths).write_bytes(records.tobytes())
    prefixes = records["high"] >> np.uint64(64 - _PREFIX_BITS)
    edges = np.searchsorted(prefixes, np.arange(MAX_BUCKETS + 1)).astype("<u4")
    _prefix_path(paths).write_bytes(edges.tobytes())


def buckets_for(samples: int) -> int:
    """How many buckets keep each below what a process may hold: a power of two."""
    wanted = max(1, -(-samples // _BUCKET_SAMPLES))
    buckets = 1
    while buckets < min(wanted, MAX_BUCKETS):
        buckets *= 2
    return buckets


def find_duplicates(workplace: Workplace, task: UnfinishedTask, *, bucket: int, buckets: int) -> Receipt:
    """Of equal samples of a bucket all but the first in reading order, written by piece."""
    pieces = read_pieces(workplace)
    parts = [_bucket_of(piece, workplace, bucket, buckets) for piece in pieces]
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    records = np.concatenate(parts) if parts else np.empty(0, dtype=_SORTED)
    order = np.lexsort((records["number"], owner, records["low"], records["high"]))
    records, owner = records[order], owner[order]
    again = np.zeros(len(records), dtype=bool)
    again[1:] = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
    dropped, owner = records["number"][again], owner[again]
    by_piece = np.lexsort((dropped, owner))
    edges = np.searchsorted(owner[by_piece], np.arange(len(pieces) + 1)).astype("<u8")
    # Not numpy's own writing: when the disk is full, its error does not say so.
    (task.directory / "numbers").write_bytes(dropped[by_piece].astype("<u4").tobytes())
    (task.directory / "pieces").write_bytes(edges.tobytes())
    return {"duplicates": len(dropped)}


def kept_samples(workplace: Workplace, piece: Piece, number: int, buckets: int) -> Bools:
    """Which samples of a piece are to be used.

    Args:
        workplace: Where the buckets lie.
        piece: The piece.
        number: Its number in reading order.
        buckets: How many buckets were compared; 0 keeps duplicates.

    Returns:
        Shape (samples of the piece,), those behind its limit included, as False.
    """
    kept = np.arange(len(read_index(piece.paths(workplace)))) < piece.samples
    for bucket in range(buckets):
        directory = workplace.directory(STAGE, bucket_name(bucket))
        first, end = _numbers(directory / "pieces", "<u8", number, 2).tolist()
        kept[_numbers(directory / "numbers", "<u4", first, end - first)] = False
    return kept


def bucket_name(bucket: int) -> str:
    """The name of a bucket's task."""
    return f"{bucket:04d}"


def _bucket_of(piece: Piece, workplace: Workplace, bucket: int, buckets: int) -> npt.NDArray[np.void]:
    paths = piece.paths(workplace)
    edges = np.fromfile(_prefix_path(paths), dtype="<u4")
    step = MAX_BUCKETS // buckets
    first, end = int(edges[bucket * step]), int(edges[(bucket + 1) * step])
    records = _numbers(_sorted_path(paths), _SORTED, first, end - first)
    counted: npt.NDArray[np.void] = records[records["number"] < piece.samples]
    return counted


def _numbers(path: Path, dtype: Any, first: int, count: int) -> npt.NDArray[Any]:  # noqa: ANN401 - a numpy dtype
    kind = np.dtype(dtype)
    return np.fromfile(path, dtype=kind, count=count, offset=first * kind.itemsize)


def _words(index: Index) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    digests = np.ascontiguousarray(index["digest"]).view(">u8").astype(np.uint64)
    return digests[:, 0], digests[:, 1]


def _sorted_path(paths: PiecePaths) -> Path:
    return paths.index.with_suffix(".sorted")


def _prefix_path(paths: PiecePaths) -> Path:
    return paths.index.with_suffix(".prefix")
