"""The tokenizer of a dataset: yours, or one that is learned from the data.

``load_tokenizer`` checks yours. Words are counted and merged over all pieces
(``count_words``, ``merge_words``, ``learn_words``); byte pairs are learned from a
sample of the texts (``sample_texts``, ``learn_pairs``). Both take bounded memory.
"""

import heapq
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

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
"""Distance from the end of such a part at which whitespace is looked for."""
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
"""Names of a special token by its role."""
_MAX_ID = 2**31
"""Largest id that a manifest can hold."""

# Stages of a preparation.
COUNT = "count-words"
MERGE = "merge-words"
SAMPLE = "sample-texts"
LEARN = "learn-tokenizer"

_SHELVES = 256
"""Number of hash buckets in which words are written, so that a merge can read only some
of them."""
_WORDS_IN_MEMORY = 2**20
"""Number of counters, about 150 MB, after which they are written to disk and counting
starts again."""
_MERGE_BYTES = 2**29
"""Memory of a merge."""
_BYTES_PER_WORD = 128
"""Memory of a counted word beyond its own bytes."""
_SAMPLED_CHARACTERS = 4096
"""Characters of a sampled text, as a single long text must not dominate."""
_LONGEST_WORD = 256
"""Characters of the longest word to learn; longer ones occur once and would take
gigabytes."""
_TEXTS_AT_ONCE = 2**16
"""Number of texts whose order is drawn at once."""
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
        by_words = self.words is not None
        encode = self._encode_words if by_words else self._encode_by_library
        for ids in encode(texts):
            # Only low ids can be reserved: most texts need no closer look.
            if len(ids) and ids.min() <= reserved[-1]:
                ids[np.isin(ids, reserved)] = unknown
            yield ids

    def _encode_by_library(
        self, texts: Sequence[str]
    ) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the ids of each text; long texts are encoded in parts."""
        longest = max(map(len, texts), default=0)
        if longest <= _STRETCH_CHARACTERS:
            yield from self._encode_batch(texts)
            return
        for text in texts:
            parts: list[npt.NDArray[np.uint32]] = []
            # One at a time, as each may take much memory.
            for stretch in _stretches(text):
                parts += self._encode_batch([stretch])
            yield np.concatenate(parts)

    def _encode_batch(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        for encoding in self.encoder.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint32)

    def _encode_words(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """Yield the same ids as the library for whole words, five times as fast."""
        assert self.words is not None
        # Looked up once, as this is the innermost loop.
        id_of = self.words.get
        unknown = self.special_ids.unk
        for text in texts:
            if any(separator in text for separator in _SEPARATORS_OF_PYTHON_ONLY):
                yield from self._encode_by_library([text])
            else:
                ids = [id_of(word, unknown) for word in text.split()]
                yield np.array(ids, dtype=np.uint32)


def _stretches(text: str) -> Iterator[str]:
    """Cut a text into parts that take bounded memory to encode.

    The cuts are before whitespace if some is near.
    """
    begin = 0
    while len(text) - begin > _STRETCH_CHARACTERS:
        end = begin + _STRETCH_CHARACTERS
        whitespace = _LAST_WHITESPACE.search(text, end - _NEAR_CHARACTERS, end)
        if whitespace is not None:
            end = whitespace.start()
        yield text[begin:end]
        begin = end
    yield text[begin:]


def learn_word_level(
    counts: Sequence[tuple[str, int]], *, vocab_size: int
) -> DatasetTokenizer:
    """Make a tokenizer of the first words of ``counts``.

    ``vocab_size``, a multiple of 64, includes special tokens.
    """
    words = [word for word, _ in counts if word not in SPECIAL_TOKENS]
    used = [*SPECIAL_TOKENS, *words][:vocab_size]
    vocabulary = {word: number for number, word in enumerate(_padded(used))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return _describe(
        tokenizer,
        tokenizer.to_str(pretty=True).encode(),
        where="the learned tokenizer",
        used=len(used),
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
    # The library can pad no vocabulary, but its JSON can.
    settings = json.loads(tokenizer.to_str())
    vocabulary = settings["model"]["vocab"]
    for word in _unused_words(used):
        vocabulary[word] = len(vocabulary)
    padded = Tokenizer.from_str(json.dumps(settings))
    return _describe(
        padded,
        padded.to_str(pretty=True).encode(),
        where="the learned tokenizer",
        used=used,
    )


def padded_vocab_size(size: int) -> int:
    """Return the next vocabulary size that is a multiple of 64."""
    return math.ceil(size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _unused_words(size: int) -> list[str]:
    """Return the words that pad a vocabulary of this size."""
    missing = padded_vocab_size(size) - size
    return [f"[unused{number}]" for number in range(missing)]


def _padded(words: list[str]) -> list[str]:
    """Pad the list of words to a multiple of 64."""
    return [*words, *_unused_words(len(words))]


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
    """Return a tokenizer with its properties.

    Args:
        tokenizer: The tokenizer.
        content: Its ``tokenizer.json``.
        where: Its name in messages.
        used: Number of ids that can occur; None for all.

    Raises:
        BadInput: If it lacks a special token, or an id is too large.
    """
    special_ids = {
        role: _special_id(tokenizer, role, names, where)
        for role, names in _USUAL_NAMES.items()
    }
    # Not the number of words, as ids may have gaps.
    id_count = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if id_count > _MAX_ID:
        raise BadInput(
            f"{where}: id {id_count - 1} exceeds 2**31",
            next_step="Number its words without gaps.",
        )
    return DatasetTokenizer(
        content=content,
        vocab_size=padded_vocab_size(id_count),
        used_vocab_size=id_count if used is None else used,
        special_ids=SpecialIds(**special_ids),
        encoder=tokenizer,
        words=_whole_words(json.loads(content)),
    )


def _special_id(
    tokenizer: Tokenizer, role: str, names: Sequence[str], where: str
) -> int:
    """Return the id of the special token with this role."""
    for name in names:
        token_id: int | None = tokenizer.token_to_id(name)
        if token_id is not None:
            return token_id
    raise BadInput(
        f"{where} has no {role} token (looked for {', '.join(names)})",
        next_step=(
            "Add that token to the tokenizer, or omit --tokenizer to train one on the"
            " data."
        ),
    )


def _whole_words(settings: Mapping[str, Any]) -> Mapping[str, int] | None:
    """Return ``DatasetTokenizer.words`` of a ``tokenizer.json``."""
    model = settings.get("model") or {}
    pre_tokenizer = settings.get("pre_tokenizer") or {}
    if model.get("type") != "WordLevel" or settings.get("normalizer"):
        return None
    if pre_tokenizer.get("type") != "WhitespaceSplit":
        return None
    words: Mapping[str, int] = model["vocab"]
    return words


def count_words(
    workplace: Workplace, directory: Path, *, number: int, selection: Selection
) -> Receipt:
    """Count the words of one piece's training samples."""
    counts: Counter[str] = Counter()
    entries = 0
    runs = 0
    paths, train, _ = selection.of(workplace, number)
    for text in paths.read_samples(train):
        counts.update(text.split())
        if len(counts) >= _WORDS_IN_MEMORY:
            _write_counts(counts, directory / f"run-{runs:03d}")
            entries += len(counts)
            runs += 1
            counts.clear()
    _write_counts(counts, directory / f"run-{runs:03d}")
    entries += len(counts)
    return {
        "entries": entries,
        "bytes": sum(path.stat().st_size for path in directory.iterdir()),
    }


def merges_for(entries: int, size_bytes: int) -> int:
    """Return the number of merges at which each fits a process.

    It is a power of two. ``entries`` counts words per file.
    """
    memory_bytes = entries * _BYTES_PER_WORD + size_bytes
    return min(_SHELVES, power_of_two(memory_bytes / _MERGE_BYTES))


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
    first_shelf = merge * _SHELVES // merges
    end_shelf = (merge + 1) * _SHELVES // merges
    counts: Counter[str] = Counter()
    for number in range(pieces):
        for run in sorted(workplace.directory(COUNT, number).glob("run-*")):
            for line in _read_shelves(run, first_shelf, end_shelf).splitlines():
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
    words = _most_frequent(merged, vocab_size)
    return _store(directory, learn_word_level(words, vocab_size=vocab_size))


def sample_texts(
    workplace: Workplace,
    directory: Path,
    *,
    number: int,
    selection: Selection,
    share: float,
) -> Receipt:
    """Write a share of the training samples of one piece, as JSON lines."""
    paths, sampled, _ = selection.of(workplace, number)
    if share < 1:
        sampled &= drawn(paths.read_index(), share, f"tokenizer {selection.seed}")
    with (directory / "texts").open("w", encoding="utf-8") as file:
        for text in paths.read_samples(sampled):
            beginning = text[:_SAMPLED_CHARACTERS]
            file.write(json.dumps(beginning, ensure_ascii=False) + "\n")
    return {}


def mixed_texts(lines: bytes) -> Iterator[str]:
    """Yield the texts of JSON ``lines`` in a seeded random order.

    The first of them represent all.
    """
    line_feeds = np.frombuffer(lines, dtype=np.uint8) == ord("\n")
    ends = np.flatnonzero(line_feeds).astype(np.uint32)
    for first in range(0, len(ends), _TEXTS_AT_ONCE):
        last = min(first + _TEXTS_AT_ONCE, len(ends))
        numbers = np.arange(first, last, dtype=np.uint64)
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
    texts = islice(mixed_texts(lines), count)
    return _store(directory, learn_bpe(texts, vocab_size=vocab_size))


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


def _store(directory: Path, tokenizer: DatasetTokenizer) -> Receipt:
    """Write a learned tokenizer; return the receipt of its task."""
    (directory / TOKENIZER_NAME).write_bytes(tokenizer.content)
    return {"used": tokenizer.used_vocab_size}


def _write_counts(counts: Counter[str], path: Path) -> None:
    """Write counts to a file, grouped by shelf.

    The file begins with the position of each shelf, and the end of the last one.
    """
    shelves: list[list[str]] = [[] for _ in range(_SHELVES)]
    for word, count in counts.items():
        if len(word) <= _LONGEST_WORD:
            shelves[zlib.crc32(word.encode()) % _SHELVES].append(f"{word}\t{count}\n")
    contents = ["".join(shelf).encode() for shelf in shelves]
    with path.open("wb") as file:
        file.write(np.cumsum([0, *map(len, contents)], dtype="<u8").tobytes())
        file.writelines(contents)


def _read_shelves(path: Path, first: int, end: int) -> bytes:
    """Return the lines of consecutive shelves, ``end`` excluded."""
    with path.open("rb") as file:
        edges = np.frombuffer(file.read(8 * (_SHELVES + 1)), dtype="<u8").tolist()
        file.seek(edges[first], os.SEEK_CUR)
        return file.read(edges[end] - edges[first])
