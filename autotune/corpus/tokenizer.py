"""The tokenizer of a dataset: learned from its text, or given and checked."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from autotune.errors import BadInput
from trainer.dataset import SpecialIds
from trainer.schema import read_json

# Ids 0 to 4, in this order, in every tokenizer that is learned here.
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# What a manifest can name.
_MAX_VOCAB_SIZE = 2**31
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
    "unk": ("[UNK]", "<unk>", "<|unk|>"),
    "cls": ("[CLS]", "<cls>", "<s>", "<bos>", "<|cls|>"),
    "sep": ("[SEP]", "<sep>", "</s>", "<eos>", "<|sep|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetTokenizer:
    """A tokenizer and what the manifest says of it. ``content`` is ``tokenizer.json``, byte for byte."""

    content: bytes
    vocab_size: int
    special_ids: SpecialIds
    encoder: Tokenizer

    @property
    def sha256(self) -> str:
        """SHA-256 of ``content``."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest stored type that holds every id."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.uint32]]:
        """The ids of each text, without special tokens around it."""
        for encoding in self.encoder.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint32)


def learn_tokenizer(texts: Iterable[str], *, vocab_size: int, advance: Callable[[int], None]) -> DatasetTokenizer:
    """Make a word-level tokenizer of the most frequent words; ties go by alphabet, so the same text gives the same one.

    Args:
        texts: Words separated by whitespace.
        vocab_size: Most words, special tokens included.
        advance: Called now and then with the number of texts read.
    """
    # Counted here, as the library's own trainer, whose result this equals, cannot be interrupted.
    counts = Counter(word for text in _counted(texts, advance) for word in text.split())
    words = sorted(counts.keys() - set(SPECIAL_TOKENS), key=lambda word: (-counts[word], word))
    kept = [*SPECIAL_TOKENS, *words][:vocab_size]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(kept)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return _describe(tokenizer, tokenizer.to_str(pretty=True).encode(), where="the learned tokenizer")


def load_tokenizer(path: Path) -> DatasetTokenizer:
    """Read a ``tokenizer.json``.

    Raises:
        BadInput: If it is no such file, or lacks one of the five special tokens.
        BadConfig: If it is missing, too large, too deep, or not JSON.
    """
    # Bounded reading first: the library below trusts the file.
    read_json(path)
    content = path.read_bytes()
    with _no_tokenizer(path):
        tokenizer = Tokenizer.from_buffer(content)
    # Lengths are the trainer's business; a stored sample is whole and bare.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    described = _describe(tokenizer, content, where=str(path))
    with _no_tokenizer(path):
        # Some faults, such as an unknown token that is not in the vocabulary, only show in use.
        tokenizer.encode("a word that no vocabulary holds: \ufdd0")
    return described


@contextlib.contextmanager
def _no_tokenizer(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises nothing narrower
        raise BadInput(
            f"{path} is not a tokenizer of the tokenizers library: {error}",
            next_step="Give a tokenizer.json as Tokenizer.save or save_pretrained of transformers writes it.",
        ) from error


def _describe(tokenizer: Tokenizer, content: bytes, *, where: str) -> DatasetTokenizer:
    ids: dict[str, int] = {}
    for role, names in _USUAL_NAMES.items():
        found = next((known for known in map(tokenizer.token_to_id, names) if known is not None), None)
        if found is None:
            raise BadInput(
                f"{where} has no {role} token (looked for {', '.join(names)})",
                next_step="Add that token to the tokenizer, or leave out --tokenizer to learn one from the data.",
            )
        ids[role] = found
    # Not the number of words: ids may have holes, and the model's table must reach the largest.
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if vocab_size > _MAX_VOCAB_SIZE:
        raise BadInput(f"{where} has the id {vocab_size - 1}", next_step="Number its words without such gaps.")
    return DatasetTokenizer(content=content, vocab_size=vocab_size, special_ids=SpecialIds(**ids), encoder=tokenizer)


def _counted(texts: Iterable[str], advance: Callable[[int], None]) -> Iterator[str]:
    for count, text in enumerate(texts, start=1):
        if count % 1024 == 0:
            advance(count)
        yield text
