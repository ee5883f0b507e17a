"""A dataset as other trainers take it: one framed sample at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE
from trainer.data.dataset import TokenDataset
from trainer.formats.manifest import TOKENIZER_NAME


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
        ids = np.concatenate(([self._special.cls], body, [self._special.sep]))
        return {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)}


def collator(data_dir: Path, padded_to: int | None = None) -> Any:
    """Return transformers' collator for masked language modelling.

    Args:
        data_dir: Directory of the dataset, with its tokenizer.
        padded_to: Multiple of tokens that batches are padded to; by default, they are
            padded to their longest sample.
    """
    names = ("pad", "unk", "cls", "sep", "mask")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data_dir / TOKENIZER_NAME),
        **{f"{name}_token": f"[{name.upper()}]" for name in names},
    )
    return DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.15, pad_to_multiple_of=padded_to
    )
