"""What a tokenizer is learned from: exact counts of all words, or a sample of the texts. Memory stays bounded."""

import heapq
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from autotune.corpus.pieces import Selection, drawn, power_of_two
from autotune.corpus.tokenizer import DatasetTokenizer, learn_bpe, learn_word_level
from autotune.corpus.workplace import Receipt, Workplace
from trainer.dataset import TOKENIZER_NAME
from trainer.plan import permute

COUNT, MERGE, SAMPLE, LEARN = "count-words", "merge-words", "sample-texts", "learn-tokenizer"

_SHELVES = 256
"""Words are put down by a hash of this many values, so that a merge can take some of them only."""
_WORDS_IN_MEMORY = 2**20
"""About 150 MB of counters; then they are put down and counting begins again."""
_MERGE_BYTES = 2**29
_WORD_BYTES = 128
"""What a counted word takes beyond its own bytes."""
_LONGEST_WORD = 256
"""Longer ones stay unknown: each would occur once, and thousands of them would make a tokenizer of gigabytes."""
_SAMPLE_CHARACTERS = 4096
"""Of one text, at most: a single long one must not decide what a tokenizer knows."""
_TEXTS_AT_ONCE = 2**16
_DISTINCT_BYTES = 5 * 2**20
"""Learning byte pairs takes about a hundred times the size of all distinct words (measured: 88 to 137)."""
_WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")
"""Nearly what the byte-level tokenizer never merges across."""


def count_words(workplace: Workplace, directory: Path, *, number: int, selection: Selection) -> Receipt:
    """Count the words of one piece's training samples."""
    counts: Counter[str] = Counter()
    runs: list[Path] = []
    entries = 0

    def put_down() -> None:
        nonlocal entries
        runs.append(directory / f"run-{len(runs):03d}")
        _put_down(counts, runs[-1])
        entries += len(counts)
        counts.clear()

    paths, train, _ = selection.of(workplace, number)
    for text in paths.read_samples(train):
        counts.update(text.split())
        if len(counts) >= _WORDS_IN_MEMORY:
            put_down()
    put_down()
    return {"entries": entries, "bytes": sum(path.stat().st_size for path in runs)}


def merges_for(entries: int, size_bytes: int) -> int:
    """Return how many merges, a power of two, keep each below what a process may hold.

    ``entries`` are words that were put down, each as often as it was, ``size_bytes`` what they take on disk.
    """
    return min(_SHELVES, power_of_two((entries * _WORD_BYTES + size_bytes) / _MERGE_BYTES))


def merge_words(workplace: Workplace, directory: Path, *, merge: int, merges: int, pieces: int, most: int) -> Receipt:
    """Add up the counts of some of the words over all pieces, and keep the most frequent."""
    shelves = range(merge * _SHELVES // merges, (merge + 1) * _SHELVES // merges)
    counts: Counter[str] = Counter()
    for number in range(pieces):
        for run in sorted(workplace.directory(COUNT, number).glob("run-*")):
            for word, count in _taken_up(run, shelves):
                counts[word] += count
    (directory / "words").write_text(json.dumps(_most_frequent(counts.items(), most)))
    return {}


def _most_frequent(counts: Iterable[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    """Return the most frequent words with their counts; ties go by alphabet."""
    return heapq.nsmallest(most, counts, key=lambda entry: (-entry[1], entry[0]))


def learn_words(workplace: Workplace, directory: Path, *, merges: int, vocab_size: int) -> Receipt:
    """Learn the most frequent words of all."""
    paths = (workplace.directory(MERGE, merge) / "words" for merge in range(merges))
    merged = ((word, count) for path in paths for word, count in json.loads(path.read_text()))
    return _learned(directory, learn_word_level(_most_frequent(merged, vocab_size), vocab_size=vocab_size))


def sample_texts(workplace: Workplace, directory: Path, *, number: int, selection: Selection, share: float) -> Receipt:
    """Put down a share of the training samples of one piece."""
    paths, kept, _ = selection.of(workplace, number)
    if share < 1:
        kept &= drawn(paths.read_index(), share, f"tokenizer {selection.seed}")
    with (directory / "texts").open("w", encoding="utf-8") as file:
        for text in paths.read_samples(kept):
            file.write(json.dumps(text[:_SAMPLE_CHARACTERS], ensure_ascii=False) + "\n")
    return {}


def mixed_texts(lines: bytes) -> Iterator[str]:
    """Yield texts in a seeded random order, so that the first of them stand for all.

    ``lines`` are JSON strings: millions of short texts as objects of their own would take several times the room.
    """
    ends = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n")).astype(np.uint32)
    for first in range(0, len(ends), _TEXTS_AT_ONCE):
        numbers = np.arange(first, min(first + _TEXTS_AT_ONCE, len(ends)), dtype=np.uint64)
        for number in permute(numbers, len(ends), 0, 0).tolist():
            begin = int(ends[number - 1]) + 1 if number else 0
            yield json.loads(lines[begin : int(ends[number])])


def learn_pairs(workplace: Workplace, directory: Path, *, pieces: int, vocab_size: int) -> Receipt:
    """Learn byte pairs from the sampled texts, or from fewer if their words are many or endless, as in proteins."""
    lines = b"".join((workplace.directory(SAMPLE, number) / "texts").read_bytes() for number in range(pieces))
    count = learnable_texts(mixed_texts(lines), _DISTINCT_BYTES)
    return _learned(directory, learn_bpe(islice(mixed_texts(lines), count), vocab_size=vocab_size))


def learnable_texts(texts: Iterable[str], distinct_bytes: int) -> int:
    """Return how many of the first texts have no more than so many bytes of distinct words; at least one."""
    distinct: set[str] = set()
    count = size_bytes = 0
    for text in texts:
        new = set(_WORDS.findall(text)) - distinct
        size_bytes += sum(len(word.encode()) for word in new)
        if count and size_bytes > distinct_bytes:
            break
        distinct |= new
        count += 1
    return count


def _learned(directory: Path, tokenizer: DatasetTokenizer) -> Receipt:
    (directory / TOKENIZER_NAME).write_bytes(tokenizer.content)
    return {"used": tokenizer.used_vocab_size}


def _put_down(counts: Counter[str], path: Path) -> None:
    shelves: list[list[str]] = [[] for _ in range(_SHELVES)]
    for word, count in counts.items():
        if len(word) <= _LONGEST_WORD:
            shelves[zlib.crc32(word.encode()) % _SHELVES].append(f"{word}\t{count}\n")
    contents = ["".join(shelf).encode() for shelf in shelves]
    with path.open("wb") as file:
        file.write(np.cumsum([0, *map(len, contents)], dtype="<u8").tobytes())
        file.writelines(contents)


def _taken_up(path: Path, shelves: range) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        edges = np.frombuffer(file.read(8 * (_SHELVES + 1)), dtype="<u8").tolist()
        file.seek(edges[shelves.start], 1)
        size_bytes = edges[shelves.stop] - edges[shelves.start]
        while size_bytes > 0:
            line = file.readline()
            size_bytes -= len(line)
            word, _, count = line.decode().rpartition("\t")
            yield word, int(count)
