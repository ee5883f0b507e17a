"""The tokenizer of a dataset.

It is given and checked, or trained in bounded memory on all words or sampled texts.
"""

import heapq
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.trainers import BpeTrainer

from autotune.corpus.pieces import Selection, drawn, power_of_two
from autotune.corpus.workplace import Receipt, Workplace
from autotune.errors import BadInput
from trainer.data.permutation import permute
from trainer.formats.manifest import TOKENIZER_NAME, SpecialIds
from trainer.formats.tables import read_json

# Ids 0 to 4, in this order, in every tokenizer that is learned here.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SEPARATORS_OF_PYTHON_ONLY = "\x1c\x1d\x1e\x1f"
"""Whitespace to ``str.split`` but not to Unicode, which the tokenizers library
follows."""
_STRETCH_CHARACTERS = 2**20
"""Longest part of a text that is encoded at once, as the library takes about 250 bytes
per character without whitespace (measured). Each cut may cost a token."""
_NEAR_CHARACTERS = 2**12
_LAST_WHITESPACE = re.compile(r"\s\S*\Z")
VOCAB_MULTIPLE = 64
"""Vocabulary sizes are multiples of this, for efficient matmuls of the embedding table
on Tensor Cores."""
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
    "unk": ("[UNK]", "<unk>", "<|unk|>"),
    "cls": ("[CLS]", "<cls>", "<s>", "<bos>", "<|cls|>"),
    "sep": ("[SEP]", "<sep>", "</s>", "<eos>", "<|sep|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
COUNT, MERGE, SAMPLE, LEARN = (
    "count-words",
    "merge-words",
    "sample-texts",
    "learn-tokenizer",
)

_SHELVES = 256
"""Number of hash buckets in which words are written, so that a merge can read only some
of them."""
_WORDS_IN_MEMORY = 2**20
"""Number of counters, about 150 MB, after which they are written to disk and counting
starts again."""
_MERGE_BYTES = 2**29
_LONGEST_WORD = 256
"""Characters of the longest word to learn; longer ones occur once and would take
gigabytes."""
_TEXTS_AT_ONCE = 2**16
_DISTINCT_BYTES = 5 * 2**20
"""Bytes of distinct words to learn byte pairs from, which takes about 100 times the
memory (measured: 88 to 137)."""
_WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")
"""Words across which the byte-level tokenizer does not merge, nearly exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetTokenizer:
    """A tokenizer, and its properties for the manifest."""

    content: bytes
    """Content of ``tokenizer.json``, byte for byte."""
    vocab_size: int
    """Number of ids, a multiple of 64."""
    used_vocab_size: int
    """Number of ids that can occur; the others pad the vocabulary."""
    special_ids: SpecialIds
    encoder: Tokenizer
    words: Mapping[str, int] | None
    """Vocabulary of a tokenizer that only looks up words between whitespace; None for
    all others."""

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """Smallest stored type that holds every id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the ids of each text without special tokens.

        Names of special tokens in a text become unknown tokens.
        """
        unknown = self.special_ids.unk
        reserved = np.array(
            sorted(set(self.special_ids.all()) - {unknown}), dtype=np.uint32
        )
        for ids in (
            self._whole_words(texts)
            if self.words is not None
            else self._by_library(texts)
        ):
            if len(ids) and ids.min() <= reserved[-1]:
                ids[np.isin(ids, reserved)] = unknown
            yield ids

    def _by_library(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        if max(map(len, texts), default=0) > _STRETCH_CHARACTERS:
            for text in texts:
                yield np.concatenate(
                    [part for one in _stretches(text) for part in self._encoded([one])]
                )
        else:
            yield from self._encoded(texts)

    def _encoded(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        for encoding in self.encoder.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint32)

    def _whole_words(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the same ids as the library for whole words, five times as fast."""
        assert self.words is not None
        number = self.words.get
        unknown = self.special_ids.unk
        for text in texts:
            if any(separator in text for separator in _SEPARATORS_OF_PYTHON_ONLY):
                yield from self._by_library([text])
            else:
                yield np.array(
                    [number(word, unknown) for word in text.split()], dtype=np.uint32
                )


def _stretches(text: str) -> Iterator[str]:
    """Cut a text into parts that take bounded memory to encode.

    The cuts are before whitespace if some is near.
    """
    begin = 0
    while len(text) - begin > _STRETCH_CHARACTERS:
        end = begin + _STRETCH_CHARACTERS
        near = _LAST_WHITESPACE.search(text, end - _NEAR_CHARACTERS, end)
        end = near.start() if near else end
        yield text[begin:end]
        begin = end
    yield text[begin:]


def learn_word_level(
    counts: Sequence[tuple[str, int]], *, vocab_size: int
) -> DatasetTokenizer:
    """Make a tokenizer of the first words of ``counts``.

    ``vocab_size``, a multiple of 64, includes special tokens.
    """
    kept = [
        *SPECIAL_TOKENS,
        *(word for word, _ in counts if word not in SPECIAL_TOKENS),
    ][:vocab_size]
    tokenizer = Tokenizer(
        WordLevel(
            {word: index for index, word in enumerate(_filled(kept))}, unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return _describe(
        tokenizer,
        tokenizer.to_str(pretty=True).encode(),
        where="the learned tokenizer",
        used=len(kept),
    )


def learn_bpe(texts: Iterable[str], *, vocab_size: int) -> DatasetTokenizer:
    """Make a byte-level BPE tokenizer, which can encode every text.

    Equal texts in equal order give the same tokenizer.
    """
    tokenizer = Tokenizer(BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    used = tokenizer.get_vocab_size()
    plain = json.loads(tokenizer.to_str())
    vocabulary = plain["model"]["vocab"]
    for word in _filled([""] * used)[used:]:
        vocabulary[word] = len(vocabulary)
    filled = Tokenizer.from_str(json.dumps(plain))
    return _describe(
        filled,
        filled.to_str(pretty=True).encode(),
        where="the learned tokenizer",
        used=used,
    )


def _filled(words: list[str]) -> list[str]:
    """Pad the list of words to a multiple of 64."""
    return [
        *words,
        *(f"[unused{number}]" for number in range(-len(words) % VOCAB_MULTIPLE)),
    ]


def load_tokenizer(path: Path, *, used: int | None = None) -> DatasetTokenizer:
    """Read a ``tokenizer.json``.

    ``used`` is the number of ids that can occur; None for all ids of the file.

    Raises:
        BadInput: If it is no tokenizer or lacks a special token.
        BadConfig: If it cannot be read as JSON.
    """
    # Bounded reading first, as the library trusts the file.
    read_json(path)
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
        # Names of special tokens in a text are plain text.
        tokenizer.encode_special_tokens = True
        # Samples are stored in full and without special tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        described = _describe(tokenizer, content, where=str(path), used=used)
        # Finds faults such as an unknown token that is not in the vocabulary.
        tokenizer.encode("a word that no vocabulary holds: \ufdd0")
    except BadInput:
        raise
    except Exception as error:  # the library raises no narrower exception
        raise BadInput(
            f"{path} is not a tokenizer of the tokenizers library: {error}",
            next_step=(
                "Pass a tokenizer.json written by Tokenizer.save, or by save_pretrained"
                " of transformers."
            ),
        ) from error
    return described


def _describe(
    tokenizer: Tokenizer, content: bytes, *, where: str, used: int | None = None
) -> DatasetTokenizer:
    ids: dict[str, int] = {}
    for role, names in _USUAL_NAMES.items():
        found = next(
            (known for known in map(tokenizer.token_to_id, names) if known is not None),
            None,
        )
        if found is None:
            raise BadInput(
                f"{where} has no {role} token (looked for {', '.join(names)})",
                next_step=(
                    "Add that token to the tokenizer, or omit --tokenizer to train one"
                    " on the data."
                ),
            )
        ids[role] = found
    # Not the number of words, as ids may have gaps.
    ids_in_all = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if ids_in_all > 2**31:  # the limit of a manifest
        raise BadInput(
            f"{where}: id {ids_in_all - 1} exceeds 2**31",
            next_step="Number its words without gaps.",
        )
    parts = json.loads(content)
    model, splitter = parts.get("model") or {}, parts.get("pre_tokenizer") or {}
    kinds = (model.get("type"), splitter.get("type"))
    looks_up = kinds == ("WordLevel", "WhitespaceSplit") and not parts.get("normalizer")
    return DatasetTokenizer(
        content=content,
        vocab_size=-(-ids_in_all // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        used_vocab_size=ids_in_all if used is None else used,
        special_ids=SpecialIds(**ids),
        encoder=tokenizer,
        words=model["vocab"] if looks_up else None,
    )


def count_words(
    workplace: Workplace, directory: Path, *, number: int, selection: Selection
) -> Receipt:
    """Count the words of one piece's training samples."""
    counts: Counter[str] = Counter()
    entries: list[int] = []
    paths, train, _ = selection.of(workplace, number)
    for text in paths.read_samples(train):
        counts.update(text.split())
        if len(counts) >= _WORDS_IN_MEMORY:
            _put_down(counts, directory / f"run-{len(entries):03d}", entries)
    _put_down(counts, directory / f"run-{len(entries):03d}", entries)
    return {
        "entries": sum(entries),
        "bytes": sum(path.stat().st_size for path in directory.iterdir()),
    }


def merges_for(entries: int, size_bytes: int) -> int:
    """Return the number of merges at which each fits a process.

    It is a power of two. ``entries`` counts words per file.
    """
    # A counted word takes 128 bytes beyond its own.
    return min(_SHELVES, power_of_two((entries * 128 + size_bytes) / _MERGE_BYTES))


def merge_words(
    workplace: Workplace,
    directory: Path,
    *,
    merge: int,
    merges: int,
    pieces: int,
    most: int,
) -> Receipt:
    """Add up the counts of this merge's words over all pieces.

    Only the ``most`` frequent words are kept.
    """
    shelves = range(merge * _SHELVES // merges, (merge + 1) * _SHELVES // merges)
    counts: Counter[str] = Counter()
    for number in range(pieces):
        for run in sorted(workplace.directory(COUNT, number).glob("run-*")):
            with run.open("rb") as file:
                edges = np.frombuffer(
                    file.read(8 * (_SHELVES + 1)), dtype="<u8"
                ).tolist()
                file.seek(edges[shelves.start], 1)
                for line in file.read(
                    edges[shelves.stop] - edges[shelves.start]
                ).splitlines():
                    word, _, count = line.decode().rpartition("\t")
                    counts[word] += int(count)
    (directory / "words").write_text(json.dumps(_most_frequent(counts.items(), most)))
    return {}


def _most_frequent(
    counts: Iterable[tuple[str, int]], most: int
) -> list[tuple[str, int]]:
    """Return the most frequent words with their counts.

    Ties are broken alphabetically.
    """
    return heapq.nsmallest(most, counts, key=lambda entry: (-entry[1], entry[0]))


def learn_words(
    workplace: Workplace, directory: Path, *, merges: int, vocab_size: int
) -> Receipt:
    """Learn a tokenizer of the most frequent words of all merges."""
    paths = (workplace.directory(MERGE, merge) / "words" for merge in range(merges))
    merged = (
        (word, count) for path in paths for word, count in json.loads(path.read_text())
    )
    return _learned(
        directory,
        learn_word_level(_most_frequent(merged, vocab_size), vocab_size=vocab_size),
    )


def sample_texts(
    workplace: Workplace,
    directory: Path,
    *,
    number: int,
    selection: Selection,
    share: float,
) -> Receipt:
    """Write a share of the training samples of one piece, as JSON lines."""
    paths, kept, _ = selection.of(workplace, number)
    if share < 1:
        kept &= drawn(paths.read_index(), share, f"tokenizer {selection.seed}")
    with (directory / "texts").open("w", encoding="utf-8") as file:
        for text in paths.read_samples(kept):
            # Truncated, as a single long text must not dominate.
            file.write(json.dumps(text[:4096], ensure_ascii=False) + "\n")
    return {}


def mixed_texts(lines: bytes) -> Iterator[str]:
    """Yield the texts of JSON ``lines`` in a seeded random order.

    The first of them represent all.
    """
    ends = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n")).astype(
        np.uint32
    )
    for first in range(0, len(ends), _TEXTS_AT_ONCE):
        numbers = np.arange(
            first, min(first + _TEXTS_AT_ONCE, len(ends)), dtype=np.uint64
        )
        for number in permute(numbers, len(ends), 0, 0).tolist():
            begin = int(ends[number - 1]) + 1 if number else 0
            yield json.loads(lines[begin : int(ends[number])])


def learn_pairs(
    workplace: Workplace, directory: Path, *, pieces: int, vocab_size: int
) -> Receipt:
    """Learn byte pairs from the sampled texts.

    Fewer texts are used if their words are many or very long, as in proteins.
    """
    lines = b"".join(
        (workplace.directory(SAMPLE, number) / "texts").read_bytes()
        for number in range(pieces)
    )
    count = learnable_texts(mixed_texts(lines), _DISTINCT_BYTES)
    return _learned(
        directory, learn_bpe(islice(mixed_texts(lines), count), vocab_size=vocab_size)
    )


def learnable_texts(texts: Iterable[str], distinct_bytes: int) -> int:
    """Return how many of the first texts to learn from; at least one.

    They have at most ``distinct_bytes`` of distinct words.
    """
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


def _put_down(counts: Counter[str], path: Path, entries: list[int]) -> None:
    """Write the counts to a file, add their number to ``entries``, and clear them."""
    shelves: list[list[str]] = [[] for _ in range(_SHELVES)]
    for word, count in counts.items():
        if len(word) <= _LONGEST_WORD:
            shelves[zlib.crc32(word.encode()) % _SHELVES].append(f"{word}\t{count}\n")
    contents = ["".join(shelf).encode() for shelf in shelves]
    with path.open("wb") as file:
        file.write(np.cumsum([0, *map(len, contents)], dtype="<u8").tobytes())
        file.writelines(contents)
    entries.append(len(counts))
    counts.clear()
