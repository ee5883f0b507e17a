"""A dataset as other trainers take it: one framed sample at a time."""

from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE
from trainer.data.dataset import TokenDataset
from trainer.formats.manifest import SpecialIds

MASKING_PROBABILITY = 0.15
"""Share of tokens to predict, as BERT has it."""
RANDOM_SAMPLES = 4096
"""Random samples to choose from."""


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples of a split, each with its special tokens.

    Args:
        dataset: The split.
        seq_length_tokens: Longest sample, special tokens included.
    """

    def __init__(self, dataset: TokenDataset, seq_length_tokens: int) -> None:
        self._dataset = dataset
        self._special = dataset.manifest.special_ids
        self._most = seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        body = self._dataset.read(number, self._most).astype(np.int64)
        return _framed(body, self._special)


class FullSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """Random samples that fill a sequence: the most memory that a dataset can need.

    Args:
        vocab_size: Tokens of the vocabulary.
        special_ids: Ids of special tokens.
        seq_length_tokens: Tokens of a sample, special tokens included.
    """

    def __init__(
        self, vocab_size: int, special_ids: SpecialIds, seq_length_tokens: int
    ) -> None:
        self._vocab_size = vocab_size
        self._special = special_ids
        self._body_tokens = seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE

    def __len__(self) -> int:
        return RANDOM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        draw = np.random.default_rng(number)
        first_word = max(self._special.all()) + 1
        body = draw.integers(first_word, self._vocab_size, self._body_tokens)
        return _framed(body, self._special)


def _framed(body: Any, special: SpecialIds) -> dict[str, Any]:
    """Return a sample with the tokens that begin and end it."""
    ids = np.concatenate(([special.cls], body, [special.sep]))
    return {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)}


def collator(
    vocab_size: int,
    special_ids: SpecialIds,
    padded_to: int | None = None,
    masking_probability: float = MASKING_PROBABILITY,
) -> Any:
    """Return transformers' collator for masked language modelling.

    Args:
        vocab_size: Tokens of the vocabulary.
        special_ids: Ids of special tokens.
        padded_to: Multiple of tokens that batches are padded to; by default, they are
            padded to their longest sample.
        masking_probability: Share of tokens to predict.
    """
    special = special_ids.model_dump()
    words = {f"word-{number}": number for number in range(vocab_size)}
    names = {number: f"[{name.upper()}]" for name, number in special.items()}
    vocabulary = {names.get(number, word): number for word, number in words.items()}
    # The collator only needs the ids, not the dataset's own rules of splitting.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel(vocabulary, unk_token=names[special_ids.unk])
        ),
        **{f"{name}_token": f"[{name.upper()}]" for name in special},
    )
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=masking_probability, pad_to_multiple_of=padded_to
    )
