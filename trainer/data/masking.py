"""Masked-LM corruption, drawn with a counter-based random number generator.

The mask of a token depends on (seed, epoch, sample, position) only, so not on the
process, order, repetition or micro-batch in which it is drawn. The 80/10/10 rule is
that of Devlin et al. 2018, but a random replacement is always an ordinary token, unlike
in transformers' collator.

Shapes: N samples, Q quads of all of them, P tokens to predict.
"""

import numpy as np

from trainer.data.array_types import Ids, Int64, Uint64
from trainer.data.permutation import GOLDEN, hash_words, mix

IGNORED_LABEL = -100
"""The label of a token that is not predicted; the default ``ignore_index`` of torch's
cross-entropy."""

_NEVER = np.uint16(2**16 - 1)
"""Draw that never masks: above the edge of every probability below 1."""
_EIGHT_TENTHS = np.uint64(2**64 * 8 // 10)
_NINE_TENTHS = np.uint64(2**64 * 9 // 10)
_QUAD_TOKENS = 4
"""Tokens whose draws of 16 bits share one 64-bit word."""
_QUAD_BITS = 2
"""Lowest bits of a token's number over all quads: they are its number in the quad."""


class Masker:
    """Random choice of the tokens to predict, and of their replacements.

    Special tokens are neither predicted nor used as a replacement. A masker has tables
    but no state.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        mask_id: int,
        special_ids: tuple[int, ...],
        probability: float,
        seed: int,
    ) -> None:
        self._mask_id = mask_id
        self._seed = seed
        self._is_ordinary = np.ones(vocab_size, dtype=bool)
        self._is_ordinary[list(special_ids)] = False
        self._ordinary_ids = np.flatnonzero(self._is_ordinary)
        # A draw of 16 bits below the edge predicts its token; one at the edge does so
        # with this probability, in units of 2**-64.
        edge = min(int(probability * 2**16), 2**16 - 2)
        share_at_edge = min(probability * 2**16 - edge, 1 - 2.0**-53)
        self._edge = np.uint16(edge)
        self._share_at_edge = np.uint64(int(share_at_edge * 2**64))
        self._counters = np.zeros(0, dtype=np.uint64)

    def corrupt(
        self, ids: Ids, begins: Int64, tokens: Int64, epochs: Int64, samples: Int64
    ) -> tuple[Int64, Ids]:
        """Choose the tokens of samples to predict, and replace them in ``ids``.

        Args:
            ids: Ids of a micro-batch, changed in place.
            begins: Position in ``ids`` of each sample's first token, shape (N,).
            tokens: Number of each sample's tokens, special tokens not counted, (N,).
            epochs: Pass over the data of each sample, which has its own masks, (N,).
            samples: Index in the dataset of each sample, (N,).

        Returns:
            The positions in ``ids`` of the tokens to predict and their original ids,
            both of shape (P,).

        Raises:
            IndexError: If an id is not below the vocabulary size.
        """
        keys = hash_words(self._seed, epochs, samples)
        drawn, words = self._draw(keys, tokens)
        predicted = _positions_of(drawn, begins, tokens)
        originals = ids[predicted]
        is_ordinary = self._is_ordinary.take(originals)
        # Stored samples seldom contain special ids, such as that of [UNK].
        if not is_ordinary.all():
            predicted = predicted[is_ordinary]
            originals = originals[is_ordinary]
            words = words[is_ordinary]
        ids[predicted] = self._replacements(originals, words)
        return predicted, originals

    def _draw(self, keys: Uint64, tokens: Int64) -> tuple[Int64, Uint64]:
        """Draw the tokens to predict, each independently.

        This runs over all tokens, so each gets 16 bits only: four of them, a quad,
        share an output of the SplitMix64 generator that starts at the sample's key.
        Bits below the edge draw the token; at the edge, 1 in 65,536, further bits
        decide, so the probability is exact to 2**-80.

        Returns:
            The number of each drawn token among those of all quads, and its 64 random
            bits; shapes (P,).
        """
        quads = _quads(tokens)
        ends = np.cumsum(quads)
        # The generator's counter runs on over the quads of all samples. Less the quads
        # of those before it, a sample's own counter begins at its key.
        first_states = keys - (ends - quads).astype(np.uint64) * GOLDEN
        quad_words = self._generate(first_states, quads)
        draws = quad_words.view("<u2").copy()
        # The last quad of a sample may hold fewer than four tokens.
        absent_tokens = _QUAD_TOKENS * quads - tokens
        for absent in range(1, _QUAD_TOKENS):
            from_end = _QUAD_TOKENS * ends - absent
            draws[from_end[absent_tokens >= absent]] = _NEVER
        drawn = np.flatnonzero(draws <= self._edge)
        at_edge = np.flatnonzero(draws[drawn] == self._edge)
        further_bits = mix(_token_words(quad_words, drawn[at_edge]) + GOLDEN)
        is_rejected = further_bits >= self._share_at_edge
        if is_rejected.any():
            drawn = np.delete(drawn, at_edge[is_rejected])
        return drawn, _token_words(quad_words, drawn)

    def _generate(self, first_states: Uint64, counts: Int64) -> Uint64:
        """Return ``counts`` outputs of SplitMix64 from each state on, in order.

        This is the hot loop of masking. It computes ``mix`` in place, with two buffers
        and no other temporaries.
        """
        total = int(counts.sum())
        if len(self._counters) < total:
            self._counters = np.arange(1, total + 1, dtype=np.uint64) * GOLDEN
        words: Uint64 = np.repeat(first_states, counts)
        words += self._counters[:total]
        buffer = words >> np.uint64(30)
        buffer ^= words
        buffer *= np.uint64(0xBF58476D1CE4E5B9)
        np.right_shift(buffer, np.uint64(27), out=words)
        words ^= buffer
        words *= np.uint64(0x94D049BB133111EB)
        np.right_shift(words, np.uint64(31), out=buffer)
        words ^= buffer
        return words

    def _replacements(self, originals: Ids, words: Uint64) -> Ids:
        """Return the ids that replace the tokens to predict, shape (P,).

        80 % are [MASK], 10 % an ordinary id, 10 % the original.
        """
        mask_id = originals.dtype.type(self._mask_id)
        result: Ids = np.where(words < _EIGHT_TENTHS, mask_id, originals)
        is_random = (words >= _EIGHT_TENTHS) & (words < _NINE_TENTHS)
        random = np.flatnonzero(is_random)
        # The upper 53 bits as a number in [0, 1).
        bits = mix(words[random] - GOLDEN) >> np.uint64(11)
        fractions = bits.astype(np.float64) * 2.0**-53
        chosen = (fractions * len(self._ordinary_ids)).astype(np.int64)
        result[random] = self._ordinary_ids[chosen]
        return result


def _quads(tokens: Int64) -> Int64:
    """Return the number of quads that hold each sample's tokens."""
    return (tokens + _QUAD_TOKENS - 1) >> _QUAD_BITS


def _positions_of(drawn: Int64, begins: Int64, tokens: Int64) -> Int64:
    """Return positions in a micro-batch of tokens that are numbered over all quads."""
    quads = _quads(tokens)
    first_numbers = _QUAD_TOKENS * (np.cumsum(quads) - quads)
    shifts = np.repeat(begins - first_numbers, quads)
    positions: Int64 = drawn + shifts[drawn >> _QUAD_BITS]
    return positions


def _token_words(quad_words: Uint64, tokens: Int64) -> Uint64:
    """Return 64 bits for each of ``tokens``, derived from those of its quad."""
    numbers_in_quads = tokens & (_QUAD_TOKENS - 1)
    return mix(quad_words[tokens >> _QUAD_BITS] + numbers_in_quads.view(np.uint64))
