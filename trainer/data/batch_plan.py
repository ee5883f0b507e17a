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

import numpy as np

from trainer.data.array_types import Int64
from trainer.data.dataset import TokenDataset
from trainer.data.packing import pack_sequences
from trainer.data.permutation import hash_words, mix, permute
from trainer.data.segments import Segments
from trainer.formats.batch_split import BatchSplit
from trainer.formats.train_config import TrainConfig, gradient_accumulation_steps

LANES = 8
"""Largest number of lanes of a job. With 256 ranks each packs an eighth of the samples;
a single rank holds this many blocks."""
MIN_BLOCK_SAMPLES = 512
"""Samples of the smallest block. Best fit fills 99.7 % of sequences of 512 tokens with
it; larger blocks would delay the start of a run, which packs one block per lane."""
SPECIAL_TOKENS_PER_SAMPLE = 2
"""Tokens that frame a sample: [CLS] ids [SEP]."""


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
        # Both quotients are rounded up.
        longest_lane = -(-self.dataset_samples // self.lanes)
        after_first_block = max(0, longest_lane - self.first_block_samples)
        later_blocks = -(-after_first_block // self.block_samples)
        return 1 + later_blocks

    @property
    def first_block_samples(self) -> int:
        """Samples of a lane's first block of an epoch.

        Few, so that the first batch of a run is ready soon.
        """
        return self.block_samples // 4

    def lanes_of(self, rank: int) -> range:
        """Return the lanes that hold the sequences of a rank, in any step."""
        # A step's sequences begin at a multiple of the global batch, and a rank gets
        # every ``world_size``-th of them. So their numbers, which determine their
        # lanes, all leave the same remainder by what these sizes have in common.
        stride = math.gcd(self.lanes, self.world_size, self.global_batch_size)
        return range(rank % stride, self.lanes, stride)

    def has_ended(self, block: int) -> bool:
        """Return whether a block lies after the last epoch.

        ``block`` is its number in its lane, counted over all epochs.
        """
        if self.max_epochs is None:
            return False
        return block >= self.max_epochs * self.blocks_per_epoch

    def samples_of(self, lane: int, block: int) -> tuple[int, Int64]:
        """Return the epoch and the samples of a lane's block.

        Args:
            lane: Number of the lane.
            block: Number of the block in the lane, counted over all epochs.

        Returns:
            The epoch, counted from 0, and the samples' indices in the dataset.
        """
        epoch, block_in_epoch = divmod(block, self.blocks_per_epoch)
        lane_begin = self.dataset_samples * lane // self.lanes
        lane_end = self.dataset_samples * (lane + 1) // self.lanes
        # All blocks have ``block_samples`` but the first, and the last, which ends with
        # the lane.
        first_block_end = lane_begin + self.first_block_samples
        end = first_block_end + block_in_epoch * self.block_samples
        begin = end - self.block_samples if block_in_epoch else lane_begin
        indices = np.arange(min(begin, lane_end), min(end, lane_end), dtype=np.uint64)
        samples = permute(indices, self.dataset_samples, self.seed, epoch)
        return epoch, samples.astype(np.int64)


def make_plan(config: TrainConfig, samples: int, world_size: int) -> BatchPlan:
    """Return the plan that splits the global batch into micro-batches of ranks.

    Args:
        config: Configuration with the global batch in sequences.
        samples: Number of samples of the dataset.
        world_size: Number of ranks.
    """
    return BatchPlan(
        seed=config.seed,
        dataset_samples=samples,
        seq_length_tokens=config.seq_length_tokens,
        layout=config.layout,
        global_batch_size=config.global_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps(config, world_size),
        world_size=world_size,
        max_epochs=config.max_epochs,
    )


def lay_out(plan: BatchPlan, lane: int, block: int, dataset: TokenDataset) -> Segments:
    """Return the samples of one block with their sequences and positions.

    Args:
        plan: Plan of the whole job.
        lane: Number of the lane.
        block: Number of the block in the lane, counted over all epochs.
        dataset: Dataset that is planned for.

    Returns:
        The samples sorted by sequence; sequences are numbered within the block.
    """
    segments = _one_sample_per_sequence(plan, lane, block, dataset)
    if plan.layout != "packed":
        return segments
    packed = pack_sequences(
        segments.tokens + SPECIAL_TOKENS_PER_SAMPLE, plan.seq_length_tokens
    )
    segments.sequences[:] = _shuffle_sequences(plan, lane, block, packed)
    segments = segments[np.argsort(segments.sequences, kind="stable")]
    segments.positions[:] = _positions_in_sequences(segments)
    return segments


def _one_sample_per_sequence(
    plan: BatchPlan, lane: int, block: int, dataset: TokenDataset
) -> Segments:
    """Return the samples of one block, each in a separate sequence.

    Samples that are longer than a sequence are cut.
    """
    epoch, samples = plan.samples_of(lane, block)
    shards, begins, tokens = dataset.locate(samples)
    max_tokens = plan.seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    return Segments.from_arrays(
        sequences=np.arange(len(samples)),
        positions=np.zeros_like(samples),
        epochs=np.full_like(samples, epoch),
        samples=samples,
        shards=shards,
        begins=begins,
        tokens=np.minimum(tokens, max_tokens),
    )


def _shuffle_sequences(
    plan: BatchPlan, lane: int, block: int, sequences: Int64
) -> Int64:
    """Renumber the packed sequences of a block in a random order that the seed fixes.

    Best fit leaves long samples in the first sequences and short ones in the last;
    without this, every block would begin with long samples.
    """
    numbers = np.arange(int(sequences.max(initial=-1)) + 1)
    draws = mix(hash_words(plan.seed, lane, block) + hash_words(numbers))
    # Sorted by one draw for each, these are the sequences in their new order. Sorting
    # them inverts that: it gives the new number of each sequence.
    shuffled_numbers = np.argsort(draws, kind="stable")
    new_numbers = np.argsort(shuffled_numbers)
    return new_numbers[sequences]


def _positions_in_sequences(segments: Segments) -> Int64:
    """Return the position of each sample, if each follows the one before it.

    Samples are sorted by sequence.
    """
    lengths = segments.tokens + SPECIAL_TOKENS_PER_SAMPLE
    # Positions as if all sequences were one, from which that of the first sample of the
    # sequence is subtracted.
    begins = np.cumsum(lengths) - lengths
    first_of_sequence = np.searchsorted(
        segments.sequences, segments.sequences, side="left"
    )
    return begins - begins[first_of_sequence]
