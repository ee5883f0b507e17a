"""Assignment of samples to sequences, micro-batches and ranks.

Everything here is a pure function of the seed, the position in the data, the rank and
the number of ranks.

    permutation of an epoch ─ cut into ─> lanes ─ cut into ─> blocks
        ─ packed into ─> sequences ─ split over ─> ranks

Sequence q of the job is the next one of lane q mod lanes. It goes to rank j mod ranks,
j being its number in the optimizer step, so the order of sequences does not depend on
the number of ranks. If both the number of ranks and the global batch are multiples of
the number of lanes, a rank packs one lane only. As packing decides how many sequences
a block gives, each lane has its own position.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.config.train_config import BatchSplit
from trainer.data.dataset import TokenDataset

Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: the increment of SplitMix64."""
_UINT64_MASK = 2**64 - 1
_FEISTEL_ROUNDS = 6
"""Rounds of the permutation: an even number, as each swaps the widths of the halves if
the number of bits is odd."""

LANES = 8
"""Largest number of lanes of a job. With 256 ranks each packs an eighth of the samples;
a single rank holds this many blocks."""
MIN_BLOCK_SAMPLES = 512
"""Smallest block, with which best fit fills 99.7 % of sequences of 512; a start packs
one block per lane."""
SPECIAL_TOKENS_PER_SAMPLE = 2
"""Tokens that frame a sample: [CLS] ids [SEP]."""


def mix(value: Uint64) -> Uint64:
    """Hash 64-bit words bijectively.

    This is the finalizer of SplitMix64 (Steele et al. 2014).
    """
    value = value ^ (value >> np.uint64(30))
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
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
    if len(lengths_tokens):
        shortest = int(lengths_tokens.min())
        longest = int(lengths_tokens.max())
        if shortest < 1 or longest > seq_length_tokens:
            raise ValueError(
                f"lengths {shortest} to {longest} exceed the range 1 to"
                f" {seq_length_tokens}"
            )
    lengths = lengths_tokens.tolist()
    sequence_of_sample = [0] * len(lengths)
    opened = 0
    # Open sequences are grouped by their free tokens. Bit n of ``free_bits`` is set if
    # a sequence with n free tokens exists, so that the lowest set bit gives the fullest
    # sequence with room, without a search.
    sequences_by_free: list[list[int]] = [[] for _ in range(seq_length_tokens)]
    free_bits = 0
    for sample in np.argsort(-lengths_tokens, kind="stable").tolist():
        length = lengths[sample]
        bits_with_room = free_bits >> length
        if bits_with_room:
            lowest_bit = bits_with_room & -bits_with_room
            free = length + lowest_bit.bit_length() - 1
            sequence = sequences_by_free[free].pop()
            if not sequences_by_free[free]:
                free_bits ^= 1 << free
        else:
            sequence = opened
            free = seq_length_tokens
            opened += 1
        sequence_of_sample[sample] = sequence
        free -= length
        if free:
            free_bits |= 1 << free
            sequences_by_free[free].append(sequence)
    return np.array(sequence_of_sample, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Segments:
    """Samples with their positions in sequences.

    All are in one array, which is cheaper to send to a worker than many small ones. The
    properties are views of it, shape (N,): assigning to their elements changes it.
    """

    table: Int64
    """Shape (7, N), one line per property, in the order below."""

    @classmethod
    def join(cls, parts: Sequence["Segments"]) -> "Segments":
        """Concatenate parts, in order."""
        empty = np.zeros((7, 0), dtype=np.int64)
        return cls(np.concatenate([empty, *(part.table for part in parts)], axis=1))

    def __len__(self) -> int:
        return len(self.table[0])

    def __getitem__(
        self, chosen: "slice | npt.NDArray[np.bool_] | Int64"
    ) -> "Segments":
        return Segments(self.table[:, chosen])

    @property
    def sequences(self) -> Int64:
        """Sequence of each sample; each function states its first number."""
        return self._line(0)

    @property
    def positions(self) -> Int64:
        """Position of each sample's [CLS] in its sequence."""
        return self._line(1)

    @property
    def epochs(self) -> Int64:
        """Epoch of each sample, counted from 0."""
        return self._line(2)

    @property
    def samples(self) -> Int64:
        """Index of each sample in the dataset."""
        return self._line(3)

    @property
    def shards(self) -> Int64:
        """Shard that holds each sample's ids."""
        return self._line(4)

    @property
    def begins(self) -> Int64:
        """Index in the shard of each sample's first id."""
        return self._line(5)

    @property
    def tokens(self) -> Int64:
        """Number of each sample's ids, special tokens not counted."""
        return self._line(6)

    def _line(self, number: int) -> Int64:
        line: Int64 = self.table[number]
        return line


class BatchPlan(BatchSplit):
    """Plan of a dataset's sequences, and of their split into micro-batches of ranks."""

    seed: int
    dataset_samples: int
    seq_length_tokens: int
    max_epochs: int | None = None
    """Passes over the dataset after which no sequences are left; None is endless."""

    @property
    def padded_tokens(self) -> int:
        """Positions of one optimizer step over all ranks.

        Padding and empty sequences are included.
        """
        micro_batches = self.gradient_accumulation_steps * self.world_size
        return micro_batches * self.sequences_per_micro_batch * self.seq_length_tokens

    @property
    def lanes(self) -> int:
        """Number of lanes in use.

        Fewer than ``LANES`` if the dataset does not fill a block in each.
        """
        return min(LANES, max(1, self.dataset_samples // self.block_samples))

    @property
    def block_samples(self) -> int:
        """Samples that are packed together.

        More for longer sequences, as the last sequence of a block stays partly empty.
        """
        return max(MIN_BLOCK_SAMPLES, self.seq_length_tokens)

    @property
    def blocks_per_epoch(self) -> int:
        """Blocks of one lane in one epoch; the last may be smaller, or empty."""
        longest_lane = -(-self.dataset_samples // self.lanes)
        after_first_block = max(0, longest_lane - self.first_block_samples)
        return 1 + -(-after_first_block // self.block_samples)

    @property
    def first_block_samples(self) -> int:
        """Samples of a lane's first block of an epoch.

        Few, so that the first batch of a run is ready soon.
        """
        return self.block_samples // 4

    def lanes_of(self, rank: int) -> range:
        """Return the lanes that hold the sequences of a rank, in any step."""
        stride = math.gcd(self.lanes, self.world_size, self.global_batch_size)
        return range(rank % stride, self.lanes, stride)

    def has_ended(self, block: int) -> bool:
        """Return whether a lane's block lies after the last epoch.

        Blocks are counted over all epochs.
        """
        if self.max_epochs is None:
            return False
        return block >= self.max_epochs * self.blocks_per_epoch

    def samples_of(self, lane: int, block: int) -> tuple[int, Int64]:
        """Return the epoch and samples of a lane's block, counted over all epochs."""
        epoch, block_in_epoch = divmod(block, self.blocks_per_epoch)
        lane_begin = self.dataset_samples * lane // self.lanes
        lane_end = self.dataset_samples * (lane + 1) // self.lanes
        first_block_end = lane_begin + self.first_block_samples
        end = first_block_end + block_in_epoch * self.block_samples
        begin = end - self.block_samples if block_in_epoch else lane_begin
        indices = np.arange(min(begin, lane_end), min(end, lane_end), dtype=np.uint64)
        samples = permute(indices, self.dataset_samples, self.seed, epoch)
        return epoch, samples.astype(np.int64)


def lay_out(plan: BatchPlan, lane: int, block: int, dataset: TokenDataset) -> Segments:
    """Return the samples of one block with their sequences and positions.

    Sequences are numbered within the block, and samples sorted by sequence.
    """
    epoch, samples = plan.samples_of(lane, block)
    shards, begins, tokens = dataset.locate(samples)
    segments = Segments(
        np.stack(
            [
                np.arange(len(samples)),
                np.zeros_like(samples),
                np.full_like(samples, epoch),
                samples,
                shards,
                begins,
                np.minimum(tokens, plan.seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE),
            ]
        )
    )
    if plan.layout != "packed":
        return segments
    packed = pack_sequences(
        segments.tokens + SPECIAL_TOKENS_PER_SAMPLE, plan.seq_length_tokens
    )
    # Best fit leaves long samples in the first sequences and short ones in the last, so
    # sequences are put in a seeded random order: that of one draw for each.
    numbers = np.arange(int(packed.max(initial=-1)) + 1)
    draws = mix(hash_words(plan.seed, lane, block) + hash_words(numbers))
    shuffled_numbers = np.argsort(np.argsort(draws, kind="stable"))
    segments.sequences[:] = shuffled_numbers[packed]
    segments = segments[np.argsort(segments.sequences, kind="stable")]
    lengths = segments.tokens + SPECIAL_TOKENS_PER_SAMPLE
    begins_in_block = np.cumsum(lengths) - lengths
    first_of_sequence = np.searchsorted(
        segments.sequences, segments.sequences, side="left"
    )
    segments.positions[:] = begins_in_block - begins_in_block[first_of_sequence]
    return segments
