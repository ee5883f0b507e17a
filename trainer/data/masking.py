"""Masked-LM corruption from a counter-based generator: the mask of a token depends on (seed, epoch, sample, position).

So masks do not depend on the process, order, repetition or micro-batch in which they
are drawn. The 80/10/10 rule is that of Devlin et al. 2018, but a random replacement is
always an ordinary token, unlike in transformers' collator.

Shapes: N samples, T tokens of all of them, P tokens to predict.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.batch_plan import GOLDEN, Int64, Uint64, hash_words, mix

IGNORED_LABEL = -100
"""The label of a token that is not predicted; the default ``ignore_index`` of torch's
cross-entropy."""

_NEVER = np.uint16(2**16 - 1)
"""Draw that never masks: above the edge of every probability below 1."""
_EIGHT_TENTHS, _NINE_TENTHS = (np.uint64(2**64 * tenths // 10) for tenths in (8, 9))

SLOTS_MULTIPLE = 64
"""Multiple of the MLM head's slots: whole tiles of Tensor Cores."""
_SLOTS_SIGMAS = 6.0
"""Standard deviations above the mean that have slots: more tokens to predict come once
in a billion micro-batches."""

Ids = npt.NDArray[np.integer[Any]]


def head_slots(places: int, probability: float) -> int:
    """Return the fixed number of slots for tokens to predict in this many positions, so that the head's shapes stay."""
    mean = places * probability
    slots = mean + _SLOTS_SIGMAS * math.sqrt(mean * (1 - probability))
    return min(
        -(-math.ceil(slots) // SLOTS_MULTIPLE) * SLOTS_MULTIPLE,
        -(-places // SLOTS_MULTIPLE) * SLOTS_MULTIPLE,
    )


class Masker:
    """Random choice of the tokens to predict and their replacements, never ``special_ids``; tables without a state."""

    def __init__(
        self,
        *,
        vocab_size: int,
        mask_id: int,
        special_ids: tuple[int, ...],
        probability: float,
        seed: int,
    ) -> None:
        self._mask_id, self._seed = mask_id, seed
        self._ordinary = np.ones(vocab_size, dtype=bool)
        self._ordinary[list(special_ids)] = False
        self._ordinary_ids = np.flatnonzero(self._ordinary)
        edge = min(int(probability * 2**16), 2**16 - 2)
        share_at_edge = min(probability * 2**16 - edge, 1 - 2.0**-53)
        self._edge, self._share_at_edge = (
            np.uint16(edge),
            np.uint64(int(share_at_edge * 2**64)),
        )
        self._counters = np.zeros(0, dtype=np.uint64)

    def corrupt(
        self, ids: Ids, places: Int64, tokens: Int64, epochs: Int64, samples: Int64
    ) -> tuple[Int64, Ids]:
        """Mask samples in ``ids``, which have ``tokens`` ids from position ``places`` on, special tokens not counted.

        Each pass over the data (``epochs``) has its own masks; all shapes but that of
        ``ids`` are (N,). Return the positions in ``ids`` of the tokens to predict and
        their original ids, both of shape (P,). Raise ``IndexError`` if an id is not
        below the vocabulary size.
        """
        drawn, words = self._draw(hash_words(self._seed, epochs, samples), tokens)
        quads = (tokens + 3) >> 2
        predicted = (
            drawn
            + np.repeat(places - 4 * (np.cumsum(quads) - quads), quads)[drawn >> 2]
        )
        originals = ids[predicted]
        ordinary = self._ordinary.take(originals)
        if not ordinary.all():
            predicted, originals, words = (
                predicted[ordinary],
                originals[ordinary],
                words[ordinary],
            )
        ids[predicted] = self._replacements(originals, words)
        return predicted, originals

    def _draw(self, keys: Uint64, tokens: Int64) -> tuple[Int64, Uint64]:
        """Draw the tokens to predict, each independently.

        This runs over all tokens, so each gets 16 bits only: four of them, a quad,
        share an output of the SplitMix64 generator that starts at the sample's key.
        Bits below the edge draw the token; at the edge, 1 in 65,536, further bits
        decide, so the probability is exact to 2**-80. Return the number of each drawn
        token among those of all quads, and its 64 random bits; shapes (P,).
        """
        quads = (tokens + 3) >> 2
        ends = np.cumsum(quads)
        of_quads = self._generate(
            keys - (ends - quads).astype(np.uint64) * GOLDEN, quads
        )
        bits = of_quads.view("<u2").copy()
        for absent in (1, 2, 3):  # the last quad of a sample may hold fewer tokens
            bits[(4 * ends - absent)[4 * quads - tokens >= absent]] = _NEVER
        drawn = np.flatnonzero(bits <= self._edge)
        at_edge = np.flatnonzero(bits[drawn] == self._edge)
        unlucky = (
            mix(_own_words(of_quads, drawn[at_edge]) + GOLDEN) >= self._share_at_edge
        )
        if unlucky.any():
            drawn = np.delete(drawn, at_edge[unlucky])
        return drawn, _own_words(of_quads, drawn)

    def _generate(self, states: Uint64, counts: Int64) -> Uint64:
        """Return SplitMix64's outputs, sample after sample, with two buffers and no other temporaries."""
        total = int(counts.sum())
        if len(self._counters) < total:
            self._counters = np.arange(1, total + 1, dtype=np.uint64) * GOLDEN
        words: Uint64 = np.repeat(states, counts)
        words += self._counters[:total]
        other = words >> np.uint64(30)
        other ^= words
        other *= np.uint64(0xBF58476D1CE4E5B9)
        np.right_shift(other, np.uint64(27), out=words)
        words ^= other
        words *= np.uint64(0x94D049BB133111EB)
        np.right_shift(words, np.uint64(31), out=other)
        words ^= other
        return words

    def _replacements(self, originals: Ids, words: Uint64) -> Ids:
        """Return the replacements: 80 % [MASK], 10 % an ordinary id, 10 % the original."""
        result: Ids = np.where(
            words < _EIGHT_TENTHS, originals.dtype.type(self._mask_id), originals
        )
        random = np.flatnonzero((words >= _EIGHT_TENTHS) & (words < _NINE_TENTHS))
        # In [0, 1).
        units = (mix(words[random] - GOLDEN) >> np.uint64(11)).astype(
            np.float64
        ) * 2.0**-53
        result[random] = self._ordinary_ids[
            (units * len(self._ordinary_ids)).astype(np.int64)
        ]
        return result


def _own_words(of_quads: Uint64, tokens: Int64) -> Uint64:
    """Return 64 bits for each of ``tokens``, derived from those of its quad."""
    return mix(of_quads[tokens >> 2] + (tokens & 3).view(np.uint64))
