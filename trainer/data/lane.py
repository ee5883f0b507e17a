"""Sequences of one lane, block after block.

``batch_plan`` explains lanes and blocks.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from trainer.data.array_types import Int64
from trainer.data.batch_plan import BatchPlan, lay_out
from trainer.data.dataset import TokenDataset
from trainer.data.position import UNKNOWN
from trainer.data.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Packed block of a lane."""

    segments: Segments
    """Samples sorted by sequence; sequences are numbered within the block."""
    sequences: int
    """Number of sequences."""


class Lane:
    """Queue of the sequences of one lane.

    The block that follows the current one is packed in advance if there is a packer,
    and when it is needed if there is none.
    """

    def __init__(
        self,
        plan: BatchPlan,
        dataset: TokenDataset,
        number: int,
        position: int,
        packer: Executor | None,
    ) -> None:
        """Start at a position of the lane.

        Args:
            plan: Plan of the whole job.
            dataset: Dataset that is planned for.
            number: Number of the lane.
            position: Position of the lane, as in ``Position.lanes``.
            packer: Executor that packs blocks in advance, if any.

        Raises:
            ValueError: If the position is unknown.
        """
        if position == UNKNOWN:
            raise ValueError(
                f"the position says nothing of lane {number}, which holds rows of this"
                " rank"
            )
        self._plan = plan
        self._dataset = dataset
        self._number = number
        self._packer = packer
        # A property that is computed from others, and needed in every step.
        self._block_samples = plan.block_samples
        self._block_number, self._next_sequence = divmod(position, self._block_samples)
        self._block: _Block | None = None
        """Current block; None before it is packed."""
        self._packed_segments = self._start_packing(self._block_number)
        """Function that returns the segments of the block to be used next, as
        ``_start_packing`` does."""

    @property
    def position(self) -> int:
        """Position of the lane, as in ``Position.lanes``."""
        return self._block_number * self._block_samples + self._next_sequence

    def take(self, count: int) -> tuple[Segments, Int64]:
        """Take the next ``count`` sequences; fewer at the end of the last epoch.

        Returns:
            Samples, whose sequences are numbered from 0, and the position of the lane
            after each sequence.
        """
        parts: list[Segments] = []
        positions: list[Int64] = [np.zeros(0, dtype=np.int64)]
        taken = 0
        while taken < count:
            block = self._current_block()
            if block is None:
                break
            part_size = min(count - taken, block.sequences - self._next_sequence)
            part = self._copy_part(block.segments, part_size)
            part.sequences[:] += taken - self._next_sequence
            parts.append(part)
            positions.append(self.position + np.arange(1, part_size + 1))
            taken += part_size
            self._next_sequence += part_size
            if self._next_sequence == block.sequences:
                self._leave_block()
                # After its last sequence, the lane is at the start of the next block.
                positions[-1][-1] = self.position
        return Segments.join(parts), np.concatenate(positions)

    def _copy_part(self, segments: Segments, sequences: int) -> Segments:
        """Return a copy of the next sequences of the current block."""
        begin, end = np.searchsorted(
            segments.sequences,
            (self._next_sequence, self._next_sequence + sequences),
        )
        return segments[begin:end].copy()

    def _leave_block(self) -> None:
        self._block_number += 1
        self._next_sequence = 0
        self._block = None

    def _current_block(self) -> _Block | None:
        """Return the block that holds the next sequence, or None after the last epoch.

        Raises:
            ValueError: If the position does not exist in this plan.
        """
        while self._block is None and self._packed_segments is not None:
            self._open_block(self._packed_segments())
        return self._block

    def _open_block(self, segments: Segments) -> None:
        """Make a packed block the current one, or skip it if it is empty.

        Raises:
            ValueError: If the position does not exist in this plan.
        """
        sequences = int(segments.sequences[-1]) + 1 if len(segments) else 0
        if self._next_sequence > sequences:
            raise ValueError(
                f"row {self._next_sequence} of a block of {sequences} rows: the"
                " position is of another plan"
            )
        self._packed_segments = self._start_packing(self._block_number + 1)
        if sequences:
            self._block = _Block(segments=segments, sequences=sequences)
        else:
            # The last block of a lane may be empty; see ``blocks_per_epoch``.
            self._block_number += 1

    def _start_packing(self, number: int) -> Callable[[], Segments] | None:
        """Start packing a block, or defer it until its samples are requested.

        Return a function that returns the packed block, or None after the last epoch.
        """
        if self._plan.has_ended(number):
            return None
        # A cold disk fetches this lane's lengths while others are packed, or while
        # earlier sequences are in use.
        self._dataset.prefetch_offsets(lambda: self._samples_of_block(number))
        pack = functools.partial(
            lay_out, self._plan, self._number, number, self._dataset
        )
        if self._packer is None:
            return pack
        return self._packer.submit(pack).result

    def _samples_of_block(self, number: int) -> Int64:
        _, samples = self._plan.samples_of(self._number, number)
        return samples
