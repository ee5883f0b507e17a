"""Randomness without state: 64-bit words and permutations that are functions of a seed and of what they are for. Pure.

Whoever asks, in whatever order and however often, gets the same answer, so nothing has to be stored or sent.
"""

import numpy as np
import numpy.typing as npt

Uint64 = npt.NDArray[np.uint64]

FEISTEL_ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: the increment of SplitMix64."""
_WORD = 2**64 - 1
_TO_UNIT = 2.0**-53


def mix(value: Uint64) -> Uint64:
    """A bijective scrambling of 64-bit words (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = value ^ (value >> np.uint64(30))
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


def hash_words(*words: int | npt.NDArray[np.int64] | Uint64) -> Uint64:
    """Hash integers and arrays of them, elementwise, into one 64-bit word each."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        array = np.asarray(word & _WORD if isinstance(word, int) else word).astype(np.uint64)
        state = mix((state ^ array) + GOLDEN)
    return state


def to_unit(words: Uint64) -> npt.NDArray[np.float64]:
    """Words to numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * _TO_UNIT


def permute(indices: Uint64, size: int, seed: int, epoch: int) -> Uint64:
    """Where indices go in a seeded permutation of ``range(size)``, without holding the permutation.

    A Feistel network over the smallest number of bits that holds ``size``, walked until the result is in range (Black
    and Rogaway 2002): memory is that of the indices asked for, and any one may be asked for.
    """
    bits = max(2, (size - 1).bit_length())
    keys = [hash_words(seed, epoch, number)[0] for number in range(FEISTEL_ROUNDS)]
    result = np.array(indices, dtype=np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        result[pending] = _feistel(result[pending], bits, keys)
        pending = pending[result[pending] >= np.uint64(size)]
    return result


def _feistel(words: Uint64, bits: int, keys: list[np.uint64]) -> Uint64:
    """The halves differ by one bit where the number of bits is odd; after an even number of rounds they are back."""
    right_bits, left_bits = bits // 2, bits - bits // 2
    left, right = words >> np.uint64(right_bits), words & np.uint64((1 << right_bits) - 1)
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right
