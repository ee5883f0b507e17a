"""Which samples a rank computes in which row of which micro-batch: pure functions of (seed, position, rank, world).

    permutation of an epoch ─ cut into ─> lanes ─ cut into ─> blocks ─ packed into ─> rows ─ dealt to ─> ranks

Row q of the job is the next row of lane q mod lanes, and goes to rank j mod world, j being its number in the optimizer
step, so the order does not depend on the number of ranks. With as many ranks as lanes, or a multiple, a rank packs the
blocks of one lane only. How many rows a block gives is known once it is packed, so each lane has a position of its own.
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

FEISTEL_ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: the increment of SplitMix64."""


def mix(value: Uint64) -> Uint64:
    """A bijective scrambling of 64-bit words (the finalizer of SplitMix64, Steele et al. 2014)."""
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
        array = np.asarray(word & (2**64 - 1) if isinstance(word, int) else word).astype(np.uint64)
        state = mix((state ^ array) + GOLDEN)
    return state


def to_unit(words: Uint64) -> npt.NDArray[np.float64]:
    """Words to numbers in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(indices: Uint64, size: int, seed: int, epoch: int) -> Uint64:
    """Where indices go in a seeded permutation of ``range(size)``, without holding the permutation.

    A Feistel network over the smallest number of bits that holds ``size``, walked until the result is in range (Black
    and Rogaway 2002): memory is that of the indices asked for, and any one may be asked for.
    """
    bits = max(2, (size - 1).bit_length())
    keys = hash_words(seed, epoch, np.arange(FEISTEL_ROUNDS))
    result = np.array(indices, dtype=np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        result[pending] = _feistel(result[pending], bits, keys)
        pending = pending[result[pending] >= np.uint64(size)]
    return result


def _feistel(words: Uint64, bits: int, keys: Uint64) -> Uint64:
    """The halves differ by one bit where the number of bits is odd; after an even number of rounds they are back."""
    right_bits, left_bits = bits // 2, bits - bits // 2
    left, right = words >> np.uint64(right_bits), words & np.uint64((1 << right_bits) - 1)
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def pack_rows(lengths: Int64, row_tokens: int) -> Int64:
    """Put samples into as few rows as best fit finds: longest first, each into the fullest row that has room.

    Open rows are kept by their free places, and one bit per number of free places says which numbers occur, so that the
    best row is found by the lowest set bit, without a search (Johnson 1973 bounds the result by 11/9 of the optimum).

    ``lengths``, shape (N,), are the tokens of each sample, special tokens included, each from 1 to ``row_tokens``; else
    ``ValueError`` is raised. Returned are the samples' rows, shape (N,), which are numbered from 0 without gaps.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= row_tokens:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not all lie in 1 to {row_tokens}")
    sizes = lengths.tolist()
    rows = [0] * len(sizes)
    opened = 0
    with_free: list[list[int]] = [[] for _ in range(row_tokens)]
    occurring = 0
    for sample in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[sample]
        roomy = occurring >> size
        if roomy:
            free = size + (roomy & -roomy).bit_length() - 1
            candidates = with_free[free]
            row = candidates.pop()
            if not candidates:
                occurring ^= 1 << free
        else:
            row, free = opened, row_tokens
            opened += 1
        rows[sample] = row
        free -= size
        if free:
            if not with_free[free]:
                occurring |= 1 << free
            with_free[free].append(row)
    return np.array(rows, dtype=np.int64)


LANES = 8
"""With 256 ranks a rank packs an eighth of the job's samples; alone it holds this many blocks."""
MIN_BLOCK_SAMPLES = 512
"""Best fit fills rows of 512 to 99.7 % with blocks of this size; starting anywhere costs one block per lane."""
SPECIAL_TOKENS_PER_SAMPLE = 2
"""A sample becomes [CLS] ids [SEP] in its row."""


class _Line:
    """A line of the table of ``Segments``."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, segments: "Segments", _: object = None) -> Int64:
        line: Int64 = segments.table[self._number]
        return line


@dataclass(frozen=True, slots=True)
class Segments:
    """Samples in their places, in one array: sending many small ones would cost more than their content."""

    table: Int64
    """Shape (7, N): row, in whatever numbering the maker states, first column in it, that of [CLS], epoch, sample, and
    where its ids lie: shard, first id there, and number of ids, special tokens aside."""

    @classmethod
    def join(cls, parts: Sequence["Segments"]) -> "Segments":
        """One after the other."""
        return cls(np.concatenate([np.zeros((7, 0), dtype=np.int64), *(part.table for part in parts)], axis=1))

    def __len__(self) -> int:
        return len(self.table[0])

    def __getitem__(self, chosen: "slice | npt.NDArray[np.bool_] | Int64") -> "Segments":
        return Segments(self.table[:, chosen])

    rows = _Line(0)
    columns = _Line(1)
    epochs = _Line(2)
    samples = _Line(3)
    shards = _Line(4)
    begins = _Line(5)
    tokens = _Line(6)


class BatchPlan(BatchSplit):
    """How samples become rows, and rows become the micro-batches of ranks.

    Row j of an optimizer step goes to rank j mod world, so ranks differ by at most one row.
    """

    seed: int
    dataset_samples: int
    row_tokens: int
    max_epochs: int | None = None
    """After so many passes there are no more rows; None goes on for ever."""

    @property
    def padded_tokens(self) -> int:
        """Places for tokens in one optimizer step of all ranks, padding and empty rows included."""
        return self.sequences_per_micro_batch * self.gradient_accumulation_steps * self.world_size * self.row_tokens

    @property
    def lanes(self) -> int:
        """Lanes in use: fewer for a dataset that does not fill a block in each."""
        return min(LANES, max(1, self.dataset_samples // self.block_samples))

    @property
    def block_samples(self) -> int:
        """Samples that are packed together: more for longer rows, as the last row of a block stays partly empty."""
        return max(MIN_BLOCK_SAMPLES, self.row_tokens)

    @property
    def blocks_per_epoch(self) -> int:
        """Blocks of one lane in one epoch; the last may be smaller, or empty."""
        longest = -(-self.dataset_samples // self.lanes)
        return 1 + -(-max(0, longest - self.first_block_samples) // self.block_samples)

    @property
    def first_block_samples(self) -> int:
        """Samples of a lane's first block of an epoch: few, so that the first batch of a run does not wait for many."""
        return self.block_samples // 4

    def lanes_of(self, rank: int) -> range:
        """The lanes that hold the rows of a rank, in whatever step."""
        stride = math.gcd(self.lanes, self.world_size, self.global_batch_size)
        return range(rank % stride, self.lanes, stride)

    def ended(self, block: int) -> bool:
        """Whether a lane's block, counted over all epochs, lies behind the last epoch."""
        return self.max_epochs is not None and block >= self.max_epochs * self.blocks_per_epoch

    def samples_of(self, lane: int, block: int) -> tuple[int, Int64]:
        """Epoch and samples of a lane's block, blocks being counted over all epochs."""
        epoch, in_epoch = divmod(block, self.blocks_per_epoch)
        first, end = (self.dataset_samples * edge // self.lanes for edge in (lane, lane + 1))
        behind = first + self.first_block_samples + in_epoch * self.block_samples
        begin = behind - self.block_samples if in_epoch else first
        indices = np.arange(min(begin, end), min(behind, end), dtype=np.uint64)
        return epoch, permute(indices, self.dataset_samples, self.seed, epoch).astype(np.int64)


def lay_out(plan: BatchPlan, lane: int, block: int, index: TokenDataset) -> Segments:
    """The rows of one block: its samples with their rows in the block and columns, sorted by row.

    In the packed layout rows come in a seeded random order, because best fit leaves long samples in the first rows and
    short ones in the last.
    """
    epoch, samples = plan.samples_of(lane, block)
    shards, begins, tokens = index.locate(samples)
    tokens = np.minimum(tokens, plan.row_tokens - SPECIAL_TOKENS_PER_SAMPLE)
    table = np.stack([np.arange(len(samples)), np.zeros_like(samples), np.full_like(samples, epoch)])
    segments = Segments(np.concatenate([table, np.stack([samples, shards, begins, tokens])]))
    if plan.layout != "packed":
        return segments
    lengths = tokens + SPECIAL_TOKENS_PER_SAMPLE
    packed = pack_rows(lengths, plan.row_tokens)
    numbers = np.arange(int(packed.max(initial=-1)) + 1)
    drawn = mix(hash_words(plan.seed, lane, block) + hash_words(numbers))
    place = np.empty_like(numbers)
    place[np.argsort(drawn, kind="stable")] = numbers
    rows = place[packed]
    order = np.argsort(rows, kind="stable")
    segments, lengths = segments[order], lengths[order]
    segments.rows[:] = rows[order]
    begins = np.cumsum(lengths) - lengths
    segments.columns[:] = begins - begins[np.searchsorted(segments.rows, segments.rows, side="left")]
    return segments
