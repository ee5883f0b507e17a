"""What a tokenizer is learned from: exact counts of all words, or a sample of the texts. Memory stays bounded."""

import heapq
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from autotune.corpus.distinct import kept_samples, read_pieces
from autotune.corpus.pieces import read_index, read_samples
from autotune.corpus.split import ValidationSplit, drawn
from autotune.corpus.workplace import Receipt, UnfinishedTask, Workplace
from trainer.plan import permute

COUNT_STAGE, MERGE_STAGE, SAMPLE_STAGE = "count-words", "merge-words", "sample-texts"

_SHELVES = 256
"""Words are put down by a hash of this many values, so that a merge can take some of them only."""
_WORDS_IN_MEMORY = 2**20
"""About 150 MB of counters; then they are put down and counting begins anew."""
_MERGE_BYTES = 2**29
_WORD_BYTES = 128
"""What a counted word takes beyond its own bytes."""
_LONGEST_WORD = 256
"""Longer ones stay unknown: each would occur once, and thousands of them would make a tokenizer of gigabytes."""
_SAMPLE_CHARACTERS = 4096
"""Of one text, at most: a single long one must not decide what a tokenizer knows."""

_TEXTS_AT_ONCE = 2**16


def training_samples(
    workplace: Workplace, number: int, buckets: int, split: ValidationSplit, share: float = 1.0
) -> Iterator[str]:
    """The samples of a piece that train, or a share of them."""
    piece = read_pieces(workplace)[number]
    paths = piece.paths(workplace)
    index = read_index(paths)
    kept = kept_samples(workplace, piece, number, buckets) & ~split.chosen(index)
    if share < 1:
        kept &= drawn(index, share, f"tokenizer {split.seed}")
    return read_samples(paths, kept)


def count_words(
    workplace: Workplace, task: UnfinishedTask, *, number: int, buckets: int, split: ValidationSplit
) -> Receipt:
    """Count the words of one piece."""
    counts: Counter[str] = Counter()
    runs = entries = size_bytes = 0

    def put_down() -> None:
        nonlocal runs, entries, size_bytes
        path = task.directory / f"run-{runs:03d}"
        _put_down(counts, path)
        runs, entries, size_bytes = runs + 1, entries + len(counts), size_bytes + path.stat().st_size

    for text in training_samples(workplace, number, buckets, split):
        counts.update(text.split())
        if len(counts) >= _WORDS_IN_MEMORY:
            put_down()
            counts.clear()
    put_down()
    return {"runs": runs, "entries": entries, "bytes": size_bytes}


def merges_for(entries: int, size_bytes: int) -> int:
    """How many merges keep each below what a process may hold: a power of two.

    Args:
        entries: Words that were put down, each as often as it was.
        size_bytes: What they take on disk.
    """
    wanted = max(1, -(-(entries * _WORD_BYTES + size_bytes) // _MERGE_BYTES))
    merges = 1
    while merges < min(wanted, _SHELVES):
        merges *= 2
    return merges


def merge_words(
    workplace: Workplace, task: UnfinishedTask, *, merge: int, merges: int, pieces: int, most: int
) -> Receipt:
    """Add up the counts of some of the words over all pieces, and keep the most frequent."""
    shelves = range(merge * _SHELVES // merges, (merge + 1) * _SHELVES // merges)
    counts: Counter[str] = Counter()
    for number in range(pieces):
        for run in sorted(workplace.directory(COUNT_STAGE, piece_name(number)).glob("run-*")):
            for word, count in _taken_up(run, shelves):
                counts[word] += count
    best = most_frequent(counts.items(), most)
    (task.directory / "words").write_text(json.dumps(best))
    return {"words": len(counts)}


def most_frequent(counts: Iterable[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    """The most frequent words with their counts; ties go by alphabet."""
    return heapq.nsmallest(most, counts, key=lambda entry: (-entry[1], entry[0]))


def merged_words(workplace: Workplace, merges: int) -> Iterator[tuple[str, int]]:
    """What the merges kept."""
    for merge in range(merges):
        path = workplace.directory(MERGE_STAGE, f"{merge:03d}") / "words"
        yield from ((word, count) for word, count in json.loads(path.read_text()))


def sample_texts(
    workplace: Workplace, task: UnfinishedTask, *, number: int, buckets: int, split: ValidationSplit, share: float
) -> Receipt:
    """Put down a share of the texts of one piece."""
    texts = 0
    with (task.directory / "texts").open("w", encoding="utf-8") as file:
        for text in training_samples(workplace, number, buckets, split, share):
            file.write(json.dumps(text[:_SAMPLE_CHARACTERS], ensure_ascii=False) + "\n")
            texts += 1
    return {"texts": texts}


def sampled_texts(workplace: Workplace, pieces: int) -> "SampledTexts":
    """All texts that were put down."""
    directories = (workplace.directory(SAMPLE_STAGE, piece_name(number)) for number in range(pieces))
    return SampledTexts(b"".join((directory / "texts").read_bytes() for directory in directories))


class SampledTexts:
    """Texts in a seeded random order, so that the first of them stand for all.

    Args:
        lines: A JSON string a line: millions of short texts as objects of their own would take several times the room.
    """

    def __init__(self, lines: bytes) -> None:
        self._lines = lines
        self._ends = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n")).astype(np.uint32)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _TEXTS_AT_ONCE):
            numbers = np.arange(first, min(first + _TEXTS_AT_ONCE, len(self)), dtype=np.uint64)
            for number in permute(numbers, len(self), 0, 0).tolist():
                begin = int(self._ends[number - 1]) + 1 if number else 0
                yield json.loads(self._lines[begin : int(self._ends[number])])


def piece_name(number: int) -> str:
    """The name of a piece's task in any stage."""
    return f"{number:08d}"


def _put_down(counts: Counter[str], path: Path) -> None:
    shelves: list[list[str]] = [[] for _ in range(_SHELVES)]
    for word, count in counts.items():
        if len(word) <= _LONGEST_WORD:
            shelves[zlib.crc32(word.encode()) % _SHELVES].append(f"{word}\t{count}\n")
    contents = ["".join(shelf).encode() for shelf in shelves]
    edges = np.cumsum([0, *map(len, contents)], dtype="<u8")
    with path.open("wb") as file:
        file.write(edges.tobytes())
        file.writelines(contents)


def _taken_up(path: Path, shelves: range) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        edges = np.frombuffer(file.read(8 * (_SHELVES + 1)), dtype="<u8").tolist()
        for line in _lines_between(
            file, 8 * (_SHELVES + 1) + edges[shelves.start], edges[shelves.stop] - edges[shelves.start]
        ):
            word, _, count = line.rpartition("\t")
            yield word, int(count)


def _lines_between(file: BinaryIO, begin: int, size: int) -> Iterator[str]:
    file.seek(begin)
    while size > 0:
        line = file.readline()
        size -= len(line)
        yield line.decode()
