"""Permutations and hashes that depend on a seed only, and are not stored."""

import numpy as np

from trainer.data.array_types import Int64, Uint64

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: the increment of SplitMix64."""
FIRST_MIX_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MIX_FACTOR = np.uint64(0x94D049BB133111EB)
"""Factors of ``mix``."""
_UINT64_MASK = 2**64 - 1
_FEISTEL_ROUNDS = 6
"""Rounds of the permutation: an even number, as each swaps the widths of the halves if
the number of bits is odd."""


def mix(value: Uint64) -> Uint64:
    """Hash 64-bit words bijectively.

    This is the finalizer of SplitMix64 (Steele et al. 2014).
    """
    value = value ^ (value >> np.uint64(30))
    value *= FIRST_MIX_FACTOR
    value ^= value >> np.uint64(27)
    value *= SECOND_MIX_FACTOR
    value ^= value >> np.uint64(31)
    return value


def hash_words(*words: int | Int64 | Uint64) -> Uint64:
    """Hash integers and arrays of them, elementwise, into one 64-bit word each."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        unsigned = word & _UINT64_MASK if isinstance(word, int) else word
        state = mix((state ^ np.asarray(unsigned).astype(np.uint64)) + GOLDEN)
    return state


def permute(indices: Uint64, size: int, seed: int, epoch: int) -> Uint64:
    """Return the images of indices under a seeded permutation of ``range(size)``.

    The permutation is not stored: memory depends on the number of indices only. It is
    a Feistel network over the fewest bits that hold ``size``, repeated until the result
    is in range (cycle walking, Black and Rogaway 2002).
    """
    bits = max(2, (size - 1).bit_length())
    keys = hash_words(seed, epoch, np.arange(_FEISTEL_ROUNDS))
    result = np.array(indices, dtype=np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        right_bits = bits // 2
        left_bits = bits - right_bits
        words = result[pending]
        left = words >> np.uint64(right_bits)
        right = words & _low_bits(right_bits)
        for key in keys:
            scrambled = left ^ (mix(right ^ key) & _low_bits(left_bits))
            left, right = right, scrambled
            left_bits, right_bits = right_bits, left_bits
        result[pending] = (left << np.uint64(right_bits)) | right
        pending = pending[result[pending] >= np.uint64(size)]
    return result


def _low_bits(count: int) -> np.uint64:
    """Return a word with the lowest ``count`` bits set."""
    return np.uint64((1 << count) - 1)
