"""Masked-LM corruption from a counter-based generator: what happens to a token depends on (seed, epoch, sample, place).

So masks do not depend on who draws them, in which order, how often, or beside what (Devlin et al. 2018 for the 80/10/10
rule). Chances are independent per ordinary token, as those of transformers' collator are; unlike there, a random
replacement is always an ordinary token.

Shapes: N samples, T tokens of all of them, P tokens to predict.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.permutation import GOLDEN, Uint64, hash_words, mix, to_unit

IGNORED_LABEL = -100
"""The label of a token that is not predicted; the default ``ignore_index`` of torch's cross-entropy."""

Int64 = npt.NDArray[np.int64]
Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingRule:
    """What is masked, and what with."""

    vocab_size: int
    """Ids that the tokenizer has; random replacements are drawn from those of them that are not special."""
    mask_id: int
    special_ids: tuple[int, ...]
    """Never masked, never drawn."""
    probability: float


class Masker:
    """Draws the tokens to predict, and what stands in their place. Holds tables of the vocabulary, and no state."""

    def __init__(self, rule: MaskingRule, seed: int) -> None:
        self._rule, self._seed = rule, seed
        self._ordinary = np.ones(rule.vocab_size, dtype=bool)
        self._ordinary[list(rule.special_ids)] = False
        self._ordinary_ids = np.flatnonzero(self._ordinary)
        self._below = np.uint64(int(rule.probability * 2**64))
        self._counters = np.zeros(0, dtype=np.uint64)

    def corrupt(self, ids: Ids, places: Int64, tokens: Int64, epochs: Int64, samples: Int64) -> tuple[Int64, Ids]:
        """Corrupt samples in place.

        Args:
            ids: Any length; holds the samples' ids, and is changed.
            places: Shape (N,), where in ``ids`` each sample begins.
            tokens: Shape (N,), how many ids it has there, special tokens around it not counted.
            epochs: Shape (N,), which pass over the data; each has masks of its own.
            samples: Shape (N,), the samples' numbers in the dataset.

        Returns:
            Places in ``ids`` of the tokens to predict, and the ids that stood there, both of shape (P,).

        Raises:
            IndexError: If an id is not below the vocabulary size.
        """
        firsts = np.cumsum(tokens) - tokens
        words, chosen = self._draw(hash_words(self._seed, epochs, samples), firsts, tokens)
        predicted = chosen + np.repeat(places - firsts, tokens)[chosen]
        originals = ids[predicted]
        ordinary = self._ordinary[originals]
        predicted, originals, words = predicted[ordinary], originals[ordinary], words[ordinary]
        ids[predicted] = self._replacements(originals, words)
        return predicted, originals

    def _draw(self, keys: Uint64, firsts: Int64, tokens: Int64) -> tuple[Uint64, Int64]:
        """Words and numbers of the tokens that fall below the probability.

        Token i of a sample gets output i of a SplitMix64 generator that starts at the sample's key, less a last shift
        that would change only low bits. The arrays are as long as all tokens, so every pass over them counts: there are
        two buffers, and no other temporaries.
        """
        total = int(tokens.sum())
        if len(self._counters) < total:
            self._counters = np.arange(1, total + 1, dtype=np.uint64) * GOLDEN
        words = np.repeat(keys - firsts.astype(np.uint64) * GOLDEN, tokens)
        words += self._counters[:total]
        other = words >> np.uint64(30)
        other ^= words
        other *= np.uint64(0xBF58476D1CE4E5B9)
        np.right_shift(other, np.uint64(27), out=words)
        words ^= other
        words *= np.uint64(0x94D049BB133111EB)
        chosen = np.flatnonzero(words < self._below)
        return words[chosen], chosen

    def _replacements(self, originals: Ids, words: Uint64) -> Ids:
        """80 % the mask, 10 % an ordinary id, 10 % what stood there."""
        words = mix(words + GOLDEN)
        fate = to_unit(words)
        drawn = self._ordinary_ids[(to_unit(mix(words + GOLDEN)) * len(self._ordinary_ids)).astype(np.int64)]
        kept: Ids = np.where(fate < 0.9, drawn, originals)
        result: Ids = np.where(fate < 0.8, self._rule.mask_id, kept)
        return result
