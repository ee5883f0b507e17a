"""The tasks that learn a tokenizer."""

from autotune.corpus import words
from autotune.corpus.tokenizer import DatasetTokenizer, learn_bpe, learn_word_level
from autotune.corpus.workplace import Receipt, UnfinishedTask, Workplace
from trainer.dataset import TOKENIZER_NAME

STAGE, TASK = "learn", "tokenizer"


def learn_words_task(
    workplace: Workplace, task: UnfinishedTask, *, pieces: int, vocab_size: int, merges: int
) -> Receipt:
    """Take the most frequent words of all."""
    del pieces
    counts = words.most_frequent(words.merged_words(workplace, merges), vocab_size)
    return _learned(task, learn_word_level(counts, vocab_size=vocab_size))


def learn_bpe_task(workplace: Workplace, task: UnfinishedTask, *, pieces: int, vocab_size: int) -> Receipt:
    """Learn byte pairs from the sampled texts."""
    return _learned(task, learn_bpe(words.sampled_texts(workplace, pieces), vocab_size=vocab_size))


def _learned(task: UnfinishedTask, tokenizer: DatasetTokenizer) -> Receipt:
    (task.directory / TOKENIZER_NAME).write_bytes(tokenizer.content)
    return {"used": tokenizer.used_vocab_size}
