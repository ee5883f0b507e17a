"""The tasks that learn a tokenizer."""

import re
from collections.abc import Iterable
from itertools import islice

from autotune.corpus import words
from autotune.corpus.tokenizer import DatasetTokenizer, learn_bpe, learn_word_level
from autotune.corpus.workplace import Receipt, UnfinishedTask, Workplace
from trainer.dataset import TOKENIZER_NAME

STAGE, TASK = "learn", "tokenizer"

_DISTINCT_BYTES = 5 * 2**20
"""Learning byte pairs takes about a hundred times the size of all distinct words (measured: 88 to 137)."""
_WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")
"""Nearly what the byte-level tokenizer never merges across."""


def learn_words_task(
    workplace: Workplace, task: UnfinishedTask, *, pieces: int, vocab_size: int, merges: int
) -> Receipt:
    """Take the most frequent words of all."""
    del pieces
    counts = words.most_frequent(words.merged_words(workplace, merges), vocab_size)
    return _learned(task, learn_word_level(counts, vocab_size=vocab_size))


def learn_bpe_task(workplace: Workplace, task: UnfinishedTask, *, pieces: int, vocab_size: int) -> Receipt:
    """Learn byte pairs from the sampled texts, or from fewer if their words are many or endless, as in proteins."""
    texts = words.sampled_texts(workplace, pieces)
    return _learned(task, learn_bpe(islice(texts, learnable_texts(texts, _DISTINCT_BYTES)), vocab_size=vocab_size))


def learnable_texts(texts: Iterable[str], distinct_bytes: int) -> int:
    """How many of the texts, from the first, have no more than so many bytes of distinct words; at least one."""
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


def _learned(task: UnfinishedTask, tokenizer: DatasetTokenizer) -> Receipt:
    (task.directory / TOKENIZER_NAME).write_bytes(tokenizer.content)
    return {"used": tokenizer.used_vocab_size}
