"""Masked-LM corruption, drawn with a counter-based random number generator.

The mask of a token depends on (seed, epoch, sample, position) only, so not on the
process, order, repetition or micro-batch in which it is drawn. The 80/10/10 rule is
that of Devlin et al. 2018, but a random replacement is always an ordinary token, unlike
in transformers' collator.

The tokens of a sample are grouped into quads of four, of which the last may be partly
empty. The quads of all samples of a micro-batch follow each other, and token numbers
run over them: token ``t`` of quad ``q`` has number ``4 * q + t``.

Shapes: N samples, Q quads of all of them, P tokens to predict.
"""

import numpy as np

from trainer.data.array_types import Ids, Int64, Uint64
from trainer.data.permutation import (
    FIRST_MIX_FACTOR,
    GOLDEN,
    SECOND_MIX_FACTOR,
    hash_words,
    mix,
)

IGNORED_LABEL = -100
"""The label of a token that is not predicted; the default ``ignore_index`` of torch's
cross-entropy."""

_NEVER_PREDICTED = np.uint16(2**16 - 1)
"""Draw of 16 bits that never predicts its token: above the edge of any probability."""
_EIGHT_TENTHS = np.uint64(2**64 * 8 // 10)
_NINE_TENTHS = np.uint64(2**64 * 9 // 10)
"""Edges of the 80/10/10 rule among words of 64 bits."""
_QUAD_TOKENS = 4
"""Tokens of a quad: their draws of 16 bits share one word of 64 bits."""
_QUAD_BITS = 2
"""Lowest bits of a token number: they number the token within its quad."""


class Masker:
    """Random choice of the tokens to predict, and of their replacements.

    Special tokens are neither predicted nor used as a replacement. A masker keeps
    tables, but nothing of the samples that it has masked.
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
        """Prepare the tables of a rule.

        Args:
            vocab_size: Number of ids, special ones included.
            mask_id: Id of [MASK].
            special_ids: Ids of all special tokens.
            probability: Probability with which a token is predicted, below 1.
            seed: Seed of the run.
        """
        self._mask_id = mask_id
        self._seed = seed
        self._is_ordinary = np.ones(vocab_size, dtype=bool)
        self._is_ordinary[list(special_ids)] = False
        self._ordinary_ids = np.flatnonzero(self._is_ordinary)
        # A draw of 16 bits below the edge predicts its token. One at the edge does so
        # with the probability ``share_at_edge``, which is kept in units of 2**-64.
        edge = min(int(probability * 2**16), 2**16 - 2)
        share_at_edge = min(probability * 2**16 - edge, 1 - 2.0**-53)
        self._edge = np.uint16(edge)
        self._share_at_edge = np.uint64(int(share_at_edge * 2**64))
        # Multiples of SplitMix64's increment, as many as the largest call needed.
        self._counters = np.zeros(0, dtype=np.uint64)

    def corrupt(
        self, ids: Ids, begins: Int64, tokens: Int64, epochs: Int64, samples: Int64
    ) -> tuple[Int64, Ids]:
        """Choose the tokens of samples to predict, and replace them in ``ids``.

        Args:
            ids: Ids of a micro-batch, changed in place.
            begins: Position in ``ids`` of each sample's first token, shape (N,).
            tokens: Number of each sample's tokens, special tokens not counted, (N,).
            epochs: Pass over the data of each sample; passes differ in masks, (N,).
            samples: Index in the dataset of each sample, (N,).

        Returns:
            The positions in ``ids`` of the tokens to predict and their original ids,
            both of shape (P,).

        Raises:
            IndexError: If the id of a token to predict exceeds the vocabulary.
        """
        keys = hash_words(self._seed, epochs, samples)
        drawn_tokens, words = self._draw(keys, tokens)
        predicted = _positions_of(drawn_tokens, begins, tokens)
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

        This runs over all tokens, so each gets 16 random bits only, and the tokens of a
        quad share one output of the SplitMix64 generator that starts at the sample's
        key. A token whose bits are below the edge is drawn. At the edge, which one
        token in 65,536 hits, further bits decide, so the probability is exact to
        2**-80.

        Args:
            keys: Key of each sample, shape (N,).
            tokens: Number of each sample's tokens, shape (N,).

        Returns:
            The numbers of the drawn tokens, and 64 random bits for each; shapes (P,).
        """
        quads = _count_quads(tokens)
        quad_ends = np.cumsum(quads)
        # The counter of ``_generate`` runs on over the quads of all samples. A state
        # that is lower by the quads before a sample makes up for that: the sample's
        # first output is that of its key.
        quads_before = (quad_ends - quads).astype(np.uint64)
        quad_words = self._generate(keys - quads_before * GOLDEN, quads)
        # By token number.
        draws = quad_words.view("<u2").copy()
        # The last quad of a sample may hold fewer than four tokens.
        absent_tokens = _QUAD_TOKENS * quads - tokens
        for distance_from_end in range(1, _QUAD_TOKENS):
            numbers = _QUAD_TOKENS * quad_ends - distance_from_end
            is_absent = absent_tokens >= distance_from_end
            draws[numbers[is_absent]] = _NEVER_PREDICTED
        drawn_tokens = np.flatnonzero(draws <= self._edge)
        at_edge = np.flatnonzero(draws[drawn_tokens] == self._edge)
        further_bits = mix(_token_words(quad_words, drawn_tokens[at_edge]) + GOLDEN)
        is_rejected = further_bits >= self._share_at_edge
        if is_rejected.any():
            drawn_tokens = np.delete(drawn_tokens, at_edge[is_rejected])
        return drawn_tokens, _token_words(quad_words, drawn_tokens)

    def _generate(self, states: Uint64, counts: Int64) -> Uint64:
        """Return ``counts`` outputs of SplitMix64 for each state, one after the other.

        The counter that is added to the states starts at 1 for the first output and
        runs on over all of them.

        This is the hot loop of masking. It computes ``mix`` in place, with two buffers
        and no other temporaries.
        """
        total = int(counts.sum())
        if len(self._counters) < total:
            self._counters = np.arange(1, total + 1, dtype=np.uint64) * GOLDEN
        words: Uint64 = np.repeat(states, counts)
        words += self._counters[:total]
        buffer = words >> np.uint64(30)
        buffer ^= words
        buffer *= FIRST_MIX_FACTOR
        np.right_shift(buffer, np.uint64(27), out=words)
        words ^= buffer
        words *= SECOND_MIX_FACTOR
        np.right_shift(words, np.uint64(31), out=buffer)
        words ^= buffer
        return words

    def _replacements(self, originals: Ids, words: Uint64) -> Ids:
        """Return the ids that replace the tokens to predict, shape (P,).

        80 % are [MASK], 10 % a random ordinary id, 10 % the original.

        Args:
            originals: Ids of the tokens, shape (P,).
            words: 64 random bits for each token, shape (P,).
        """
        mask_id = originals.dtype.type(self._mask_id)
        replacements: Ids = np.where(words < _EIGHT_TENTHS, mask_id, originals)
        is_random = (words >= _EIGHT_TENTHS) & (words < _NINE_TENTHS)
        random_tokens = np.flatnonzero(is_random)
        # The upper 53 bits as a number in [0, 1).
        bits = mix(words[random_tokens] - GOLDEN) >> np.uint64(11)
        fractions = bits.astype(np.float64) * 2.0**-53
        indices = (fractions * len(self._ordinary_ids)).astype(np.int64)
        replacements[random_tokens] = self._ordinary_ids[indices]
        return replacements


def _count_quads(tokens: Int64) -> Int64:
    """Return the number of quads that hold each sample's tokens."""
    return (tokens + _QUAD_TOKENS - 1) >> _QUAD_BITS


def _positions_of(token_numbers: Int64, begins: Int64, tokens: Int64) -> Int64:
    """Return the positions in a micro-batch of tokens.

    Args:
        token_numbers: Numbers of the tokens, shape (P,).
        begins: As in ``Masker.corrupt``, shape (N,).
        tokens: As in ``Masker.corrupt``, shape (N,).
    """
    quads = _count_quads(tokens)
    first_numbers = _QUAD_TOKENS * (np.cumsum(quads) - quads)
    # By quad: the difference between its tokens' positions and their numbers.
    shifts = np.repeat(begins - first_numbers, quads)
    positions: Int64 = token_numbers + shifts[token_numbers >> _QUAD_BITS]
    return positions


def _token_words(quad_words: Uint64, token_numbers: Int64) -> Uint64:
    """Return 64 bits for each of some tokens, derived from those of its quad."""
    numbers_in_quads = token_numbers & (_QUAD_TOKENS - 1)
    words_of_quads = quad_words[token_numbers >> _QUAD_BITS]
    return mix(words_of_quads + numbers_in_quads.view(np.uint64))
