"""Assignment of samples to sequences, micro-batches and ranks: pure functions of (seed, position, rank, world).

    permutation of an epoch ─ cut into ─> lanes ─ cut into ─> blocks ─ packed into ─> sequences ─ split over ─> ranks

Sequence q of the job is the next one of lane q mod lanes, and goes to rank j mod world,
j being its number in the optimizer step, so the order does not depend on the number of
ranks. If both that and the global batch are multiples of the number of lanes, a rank
packs one lane only. As packing decides how many sequences a block gives, each lane has
its own position. Names in the code say ``row`` for a sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.config.train_config import BatchSplit
from trainer.data.dataset import TokenDataset

Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: the increment of SplitMix64."""


def mix(value: Uint64) -> Uint64:
    """Hash 64-bit words bijectively, with the finalizer of SplitMix64 (Steele et al. 2014)."""
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
        array = np.asarray(
            word & (2**64 - 1) if isinstance(word, int) else word
        ).astype(np.uint64)
        state = mix((state ^ array) + GOLDEN)
    return state


def permute(indices: Uint64, size: int, seed: int, epoch: int) -> Uint64:
    """Return the images of indices under a seeded permutation of ``range(size)``, without storing it.

    A Feistel network over the fewest bits that hold ``size``, repeated until the result
    is in range (cycle walking, Black and Rogaway 2002): memory depends on the number of
    indices only.
    """
    bits = max(2, (size - 1).bit_length())
    # An even number of rounds, as each swaps the widths of the halves if ``bits`` is
    # odd.
    keys = hash_words(seed, epoch, np.arange(6))
    result = np.array(indices, dtype=np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        right_bits, left_bits, words = bits // 2, bits - bits // 2, result[pending]
        left, right = (
            words >> np.uint64(right_bits),
            words & np.uint64((1 << right_bits) - 1),
        )
        for key in keys:
            left, right = (
                right,
                left ^ (mix(right ^ key) & np.uint64((1 << left_bits) - 1)),
            )
            left_bits, right_bits = right_bits, left_bits
        result[pending] = (left << np.uint64(right_bits)) | right
        pending = pending[result[pending] >= np.uint64(size)]
    return result


def pack_sequences(lengths: Int64, seq_length_tokens: int) -> Int64:
    """Pack samples into sequences by best fit decreasing: longest first, each into the fullest sequence with room.

    Open sequences are grouped by their free tokens, with one bit for each number that
    occurs, so that the lowest set bit gives the best sequence without a search (Johnson
    1973 bounds the result by 11/9 of the optimum).

    ``lengths``, shape (N,), are tokens per sample, special tokens included. Return the
    sequence of each sample, shape (N,), numbered from 0 without gaps. Raise
    ``ValueError`` if a length is not from 1 to ``seq_length_tokens``.
    """
    if (
        len(lengths)
        and not 1 <= int(lengths.min()) <= int(lengths.max()) <= seq_length_tokens
    ):
        raise ValueError(
            f"lengths {lengths.min()} to {lengths.max()} exceed the range 1 to"
            f" {seq_length_tokens}"
        )
    sizes = lengths.tolist()
    rows = [0] * len(sizes)
    opened = 0
    with_free: list[list[int]] = [[] for _ in range(seq_length_tokens)]
    occurring = 0
    for sample in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[sample]
        if roomy := occurring >> size:
            free = size + (roomy & -roomy).bit_length() - 1
            row = with_free[free].pop()
            if not with_free[free]:
                occurring ^= 1 << free
        else:
            row, free = opened, seq_length_tokens
            opened += 1
        rows[sample] = row
        free -= size
        if free:
            if not with_free[free]:
                occurring |= 1 << free
            with_free[free].append(row)
    return np.array(rows, dtype=np.int64)


LANES = 8
"""Most lanes of a job. With 256 ranks each packs an eighth of the samples; a single
rank holds this many blocks."""
MIN_BLOCK_SAMPLES = 512
"""Smallest block, with which best fit fills 99.7 % of sequences of 512; a start packs
one block per lane."""
SPECIAL_TOKENS_PER_SAMPLE = 2
"""Tokens that frame a sample: [CLS] ids [SEP]."""


def _line(number: int) -> Any:
    return property(lambda segments: segments.table[number])


@dataclass(frozen=True, slots=True)
class Segments:
    """Samples with their positions, in one array, which is cheaper to send than many small ones."""

    table: Int64
    """Shape (7, N): sequence (each function states its numbering), column of [CLS] in
    it, epoch, sample, and location of the sample's ids: shard, first id there, and
    number of ids, special tokens not counted."""

    @classmethod
    def join(cls, parts: Sequence["Segments"]) -> "Segments":
        """Concatenate parts, in order."""
        return cls(
            np.concatenate(
                [np.zeros((7, 0), dtype=np.int64), *(part.table for part in parts)],
                axis=1,
            )
        )

    def __len__(self) -> int:
        return len(self.table[0])

    def __getitem__(
        self, chosen: "slice | npt.NDArray[np.bool_] | Int64"
    ) -> "Segments":
        return Segments(self.table[:, chosen])

    rows, columns, epochs, samples, shards, begins, tokens = map(_line, range(7))


class BatchPlan(BatchSplit):
    """Plan of the sequences of a dataset, and of their split into the micro-batches of ranks."""

    seed: int
    dataset_samples: int
    seq_length_tokens: int
    max_epochs: int | None = None
    """Passes over the dataset after which no sequences are left; None is endless."""

    @property
    def padded_tokens(self) -> int:
        """Positions of one optimizer step over all ranks, padding and empty sequences included."""
        micro_batches = self.gradient_accumulation_steps * self.world_size
        return micro_batches * self.sequences_per_micro_batch * self.seq_length_tokens

    @property
    def lanes(self) -> int:
        """Lanes in use: fewer than ``LANES`` if the dataset does not fill a block in each."""
        return min(LANES, max(1, self.dataset_samples // self.block_samples))

    @property
    def block_samples(self) -> int:
        """Samples packed together: more for longer sequences, as the last sequence of a block stays partly empty."""
        return max(MIN_BLOCK_SAMPLES, self.seq_length_tokens)

    @property
    def blocks_per_epoch(self) -> int:
        """Blocks of one lane in one epoch; the last may be smaller, or empty."""
        longest = -(-self.dataset_samples // self.lanes)
        return 1 + -(-max(0, longest - self.first_block_samples) // self.block_samples)

    @property
    def first_block_samples(self) -> int:
        """Samples of a lane's first block of an epoch: few, so that the first batch of a run is ready soon."""
        return self.block_samples // 4

    def lanes_of(self, rank: int) -> range:
        """Return the lanes that hold the sequences of a rank, in any step."""
        stride = math.gcd(self.lanes, self.world_size, self.global_batch_size)
        return range(rank % stride, self.lanes, stride)

    def ended(self, block: int) -> bool:
        """Return whether a lane's block, counted over all epochs, lies after the last epoch."""
        return (
            self.max_epochs is not None
            and block >= self.max_epochs * self.blocks_per_epoch
        )

    def samples_of(self, lane: int, block: int) -> tuple[int, Int64]:
        """Return the epoch and samples of a lane's block, counted over all epochs."""
        epoch, in_epoch = divmod(block, self.blocks_per_epoch)
        first, end = (
            self.dataset_samples * edge // self.lanes for edge in (lane, lane + 1)
        )
        behind = first + self.first_block_samples + in_epoch * self.block_samples
        begin = behind - self.block_samples if in_epoch else first
        indices = np.arange(min(begin, end), min(behind, end), dtype=np.uint64)
        return epoch, permute(indices, self.dataset_samples, self.seed, epoch).astype(
            np.int64
        )


def lay_out(plan: BatchPlan, lane: int, block: int, index: TokenDataset) -> Segments:
    """Return the samples of one block with their columns and sequences, numbered in the block; sorted by sequence."""
    epoch, samples = plan.samples_of(lane, block)
    shards, begins, tokens = index.locate(samples)
    tokens = np.minimum(tokens, plan.seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE)
    table = np.stack(
        [np.arange(len(samples)), np.zeros_like(samples), np.full_like(samples, epoch)]
    )
    segments = Segments(
        np.concatenate([table, np.stack([samples, shards, begins, tokens])])
    )
    if plan.layout != "packed":
        return segments
    packed = pack_sequences(tokens + SPECIAL_TOKENS_PER_SAMPLE, plan.seq_length_tokens)
    numbers = np.arange(int(packed.max(initial=-1)) + 1)
    # In seeded random order, as best fit leaves long samples in the first sequences,
    # short ones in the last.
    drawn = mix(hash_words(plan.seed, lane, block) + hash_words(numbers))
    # Ranks of the draws.
    segments.rows[:] = np.argsort(np.argsort(drawn, kind="stable"))[packed]
    segments = segments[np.argsort(segments.rows, kind="stable")]
    lengths = segments.tokens + SPECIAL_TOKENS_PER_SAMPLE
    begins = np.cumsum(lengths) - lengths
    segments.columns[:] = (
        begins - begins[np.searchsorted(segments.rows, segments.rows, side="left")]
    )
    return segments
