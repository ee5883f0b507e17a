"""Masked-LM corruption from a counter-based generator: what happens to a token depends on (seed, epoch, sample, place).

So masks do not depend on who draws them, in which order, or how often (Devlin et al. 2018 for the 80/10/10 rule).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.plan import hash_words

IGNORED_LABEL = -100
"""The label of a token that is not predicted; the default ``ignore_index`` of torch's cross-entropy."""

_TO_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingRule:
    """What is masked, and what with."""

    vocab_size: int
    """Ids that the tokenizer has; random replacements are drawn from those of them that are not special."""
    mask_id: int
    special_ids: tuple[int, ...]
    """Never masked, never drawn."""
    probability: float


def mask_tokens(
    ids: npt.NDArray[np.integer[Any]], rule: MaskingRule, *, seed: int, epoch: int, sample: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Corrupt one sample.

    Args:
        ids: Shape (T,), the sample's ids with its special tokens.
        rule: What is masked and how often.
        seed: The run's seed.
        epoch: Which pass over the data; each has masks of its own.
        sample: The sample's number in the dataset.

    Returns:
        Corrupted ids and labels, both of shape (T,); labels are ``IGNORED_LABEL`` where nothing is to be predicted.
    """
    original = ids.astype(np.int64)
    places = np.arange(len(original), dtype=np.uint64)
    words = hash_words(seed, epoch, sample, places)
    ordinary = ~np.isin(original, rule.special_ids)
    chosen = ordinary & (_unit(words) < rule.probability)
    labels = np.where(chosen, original, IGNORED_LABEL)
    fate = _unit(hash_words(words, 1))
    corrupted = np.where(chosen & (fate < 0.8), rule.mask_id, original)
    replaced = chosen & (fate >= 0.8) & (fate < 0.9)
    corrupted = np.where(replaced, _ordinary_id(_unit(hash_words(words, 2)), rule), corrupted)
    return corrupted, labels


def _unit(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Words to numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * _TO_UNIT


def _ordinary_id(unit: npt.NDArray[np.float64], rule: MaskingRule) -> npt.NDArray[np.int64]:
    """Numbers in [0, 1) to ids, special ids stepped over."""
    special = np.array(sorted(set(rule.special_ids)), dtype=np.int64)
    drawn = (unit * (rule.vocab_size - len(special))).astype(np.int64)
    for special_id in special:  # ascending, so that one step over each is enough
        drawn += drawn >= special_id
    return drawn
