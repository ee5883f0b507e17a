"""Packing of samples into sequences of a fixed length."""

import numpy as np

from trainer.data.array_types import Int64


def pack_sequences(lengths_tokens: Int64, seq_length_tokens: int) -> Int64:
    """Pack samples into sequences by best fit decreasing.

    Samples are taken longest first, and each goes into the fullest sequence that has
    room for it. Johnson (1973) bounds the result by 11/9 of the optimum.

    Args:
        lengths_tokens: Tokens per sample, special tokens included, shape (N,).
        seq_length_tokens: Capacity of a sequence.

    Returns:
        The sequence of each sample, shape (N,), numbered from 0 without gaps.

    Raises:
        ValueError: If a length is not from 1 to ``seq_length_tokens``.
    """
    _check_lengths(lengths_tokens, seq_length_tokens)
    lengths = lengths_tokens.tolist()
    sequence_of_sample = [0] * len(lengths)
    sequences = 0
    # The fullest sequence with room is found without a search: sequences are grouped by
    # their free tokens, and bit n of ``free_bits`` is set if the group of n free tokens
    # is not empty. Shifted right by a length, the mask keeps only the groups with room
    # for it, and its lowest set bit is the fullest of them.
    sequences_by_free_tokens: list[list[int]] = [[] for _ in range(seq_length_tokens)]
    free_bits = 0
    longest_first = np.argsort(-lengths_tokens, kind="stable")
    for sample in longest_first.tolist():
        length = lengths[sample]
        bits_with_room = free_bits >> length
        if bits_with_room:
            lowest_bit = bits_with_room & -bits_with_room
            free_tokens = length + lowest_bit.bit_length() - 1
            fullest_with_room = sequences_by_free_tokens[free_tokens]
            sequence = fullest_with_room.pop()
            if not fullest_with_room:
                free_bits ^= 1 << free_tokens
        else:
            sequence = sequences
            sequences += 1
            free_tokens = seq_length_tokens
        sequence_of_sample[sample] = sequence
        free_tokens -= length
        if free_tokens:
            sequences_by_free_tokens[free_tokens].append(sequence)
            free_bits |= 1 << free_tokens
    return np.array(sequence_of_sample, dtype=np.int64)


def _check_lengths(lengths_tokens: Int64, seq_length_tokens: int) -> None:
    """Check that every sample fits into an empty sequence."""
    if not len(lengths_tokens):
        return
    shortest = int(lengths_tokens.min())
    longest = int(lengths_tokens.max())
    if shortest < 1 or longest > seq_length_tokens:
        raise ValueError(
            f"lengths {shortest} to {longest} exceed the range 1 to {seq_length_tokens}"
        )
