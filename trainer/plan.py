"""Which rows a rank computes in which micro-batch: pure functions of (seed, step, rank, world size).

Rows run on from epoch to epoch. A position is the number of rows that the whole job has consumed before; it names an
epoch and a sample, whatever the number of ranks, so the order of the data does not depend on the world size.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Uint64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

FEISTEL_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """The rows of one micro-batch on one rank; fewer than the micro-batch holds where the global batch ends."""

    epochs: Int64
    samples: Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a global batch is dealt to ranks and micro-batches.

    Row j of an optimizer step goes to rank j mod world, so ranks differ by at most one row.
    """

    seed: int
    dataset_samples: int
    global_batch_rows: int
    accumulation_steps: int
    world_size: int

    @property
    def rows_per_microbatch_per_rank(self) -> int:
        """The even share, at most the configured micro-batch; the shape of every micro-batch."""
        return -(-self.global_batch_rows // (self.world_size * self.accumulation_steps))

    def slot_tokens(self, seq_length_tokens: int) -> int:
        """Places for tokens in one optimizer step of all ranks, padding and empty rows included."""
        return self.rows_per_microbatch_per_rank * self.accumulation_steps * self.world_size * seq_length_tokens

    def rows(self, micro_step: int, rank: int) -> RowPlan:
        """The rows of a micro-batch.

        Args:
            micro_step: Optimizer step times accumulation steps plus the micro-batch's number in its step.
            rank: Whose rows.
        """
        step, part = divmod(micro_step, self.accumulation_steps)
        slots = np.arange(self.rows_per_microbatch_per_rank, dtype=np.int64)
        in_step = (part * self.rows_per_microbatch_per_rank + slots) * self.world_size + rank
        positions = step * self.global_batch_rows + in_step[in_step < self.global_batch_rows]
        epochs, indices = np.divmod(positions, self.dataset_samples)
        samples = np.empty_like(indices)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = permute(indices[here].astype(np.uint64), self.dataset_samples, self.seed, int(epoch))
        return RowPlan(epochs=epochs, samples=samples)


def mix(value: Uint64) -> Uint64:
    """A bijective scrambling of 64-bit words (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def hash_words(*words: int | Uint64) -> Uint64:
    """Hash integers and arrays of them, elementwise, into one 64-bit word each."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        array = np.asarray(word & 0xFFFFFFFFFFFFFFFF if isinstance(word, int) else word, dtype=np.uint64)
        state = mix((state ^ array) + _GOLDEN)
    return state


def permute(indices: Uint64, size: int, seed: int, epoch: int) -> Uint64:
    """Where indices go in a seeded permutation of ``range(size)``, without holding the permutation.

    A Feistel network over the smallest even number of bits that holds ``size``, walked until the result is in range
    (Black and Rogaway 2002): memory is that of the indices asked for, and any one may be asked for.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [hash_words(seed, epoch, number)[0] for number in range(FEISTEL_ROUNDS)]
    result = np.array(indices, dtype=np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        result[pending] = _feistel(result[pending], half, keys)
        pending = pending[result[pending] >= np.uint64(size)]
    return result


def _feistel(words: Uint64, half_bits: int, keys: list[np.uint64]) -> Uint64:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = words >> shift, words & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right
