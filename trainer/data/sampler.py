"""Micro-batch plans of one rank, in order, from any position in the data.

Plans are made a little ahead of their use.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from trainer.config.tables import StrictTable
from trainer.data.batch_plan import BatchPlan, Int64, Segments, lay_out
from trainer.data.dataset import TokenDataset

SEQUENCES_PLANNED_TOGETHER = 1024
"""Sequences up to which steps are planned together: a plan costs the same for 64
sequences as for 1,024."""
UNKNOWN = -1
"""Position of a lane that this rank does not follow."""


class Position(StrictTable):
    """Position of the whole job in the data, as in a checkpoint.

    Valid for any number of ranks and workers.
    """

    # The names of the fields are keys of checkpoints.
    steps: int
    """Optimizer steps begun."""
    rows: int
    """Sequences that the job has consumed."""
    lanes: Annotated[tuple[int, ...], Field(strict=False)]
    """Position of each lane: blocks consumed times the plan's ``block_samples`` plus
    sequences consumed of the current block, the only one that is packed again to
    resume. ``UNKNOWN`` for a lane of other ranks."""

    @classmethod
    def start(cls, plan: BatchPlan) -> "Position":
        """Return the position before the first sequence."""
        return cls(steps=0, rows=0, lanes=(0,) * plan.lanes)


def join_positions(positions: list[Position]) -> Position:
    """Join the positions of ranks after the same step.

    Raises:
        ValueError: If steps differ or a lane is missing.
    """
    first = positions[0]
    for position in positions:
        if (position.steps, position.rows) != (first.steps, first.rows):
            raise ValueError("positions of different steps")
    by_lane = zip(*(position.lanes for position in positions), strict=True)
    lanes = tuple(max(of_ranks) for of_ranks in by_lane)
    if UNKNOWN in lanes:
        raise ValueError(f"no rank follows lane {lanes.index(UNKNOWN)}")
    return Position(steps=first.steps, rows=first.rows, lanes=lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """One micro-batch of one rank.

    Sequences without a segment are empty and add no loss.
    """

    segments: Segments
    """Samples sorted by sequence and position; sequences are numbered within the
    micro-batch."""
    after: Position | None
    """Position of the job after this optimizer step; only with the last micro-batch of
    a step."""


class SequenceSampler:
    """Endless iterator over the micro-batch plans of one rank.

    There are ``gradient_accumulation_steps`` of them per optimizer step. The
    ``position`` must know the lanes of ``rank``. With ``ahead``, a thread packs each
    block before it is needed, which hides a slow disk; if this process reads the
    samples as well, the thread only competes with it.
    """

    def __init__(
        self,
        plan: BatchPlan,
        dataset: TokenDataset,
        rank: int,
        position: Position | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self._plan = plan
        self._rank = rank
        # Properties of the plan that are used in every step.
        self._lanes_of_job = plan.lanes
        self._sequences_of_micro_batch = plan.sequences_per_micro_batch
        self._position = position or Position.start(plan)
        # One thread: blocks are packed while earlier ones are in use, and do not
        # compete with each other.
        packer = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="packer")
            if ahead
            else None
        )
        self._lanes = {
            lane: _Lane(plan, dataset, lane, self._position.lanes[lane], packer)
            for lane in plan.lanes_of(rank)
        }

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        max_steps = SEQUENCES_PLANNED_TOGETHER // self._plan.global_batch_size
        steps = 1  # so that the first batch does not wait for others
        while True:
            yield from self._plan_steps(steps)
            steps = max(1, min(2 * steps, max_steps))

    def _plan_steps(self, steps: int) -> list[MicroBatchPlan]:
        """Return the micro-batch plans of the next steps."""
        plan = self._plan
        # The numbers of these sequences in the order of the whole job begin at
        # ``position.rows``; in the segments of a share they begin at 0.
        shares = {
            number: self._take_share(number, lane, steps)
            for number, lane in self._lanes.items()
        }
        segments = Segments.join([share.segments for share in shares.values()])
        step, number_in_step = np.divmod(segments.sequences, plan.global_batch_size)
        is_mine = number_in_step % plan.world_size == self._rank
        segments = segments[is_mine]
        step = step[is_mine]
        number_in_rank = number_in_step[is_mine] // plan.world_size
        if plan.layout == "bucketed":
            # Sequences of like length get neighbouring numbers, so the same
            # micro-batch. Those of a step stay the same.
            by_length = np.lexsort((segments.tokens, step))
            segments = segments[by_length]
            step = step[by_length]
            number_in_rank = np.arange(len(step)) - np.searchsorted(step, step)
        micro_batch_in_step, sequence = np.divmod(
            number_in_rank, self._sequences_of_micro_batch
        )
        micro_batch = step * plan.gradient_accumulation_steps + micro_batch_in_step
        segments.sequences[:] = sequence
        order = np.lexsort((segments.positions, sequence, micro_batch))
        edges = np.searchsorted(
            micro_batch[order], np.arange(steps * plan.gradient_accumulation_steps + 1)
        ).tolist()
        segments = segments[order]
        positions_after = self._advance(steps, shares)
        return [
            MicroBatchPlan(segments=segments[begin:end], after=after)
            for (begin, end), after in zip(
                itertools.pairwise(edges), positions_after, strict=True
            )
        ]

    def _advance(
        self, steps: int, shares: "dict[int, _LaneShare]"
    ) -> list[Position | None]:
        """Advance the position by some steps.

        Return the position after each micro-batch: None but for the last of a step.
        """
        before_last = [None] * (self._plan.gradient_accumulation_steps - 1)
        positions_after: list[Position | None] = []
        for number in range(steps):
            # Not validated, as that would cost a fifth of a small step's plan.
            self._position = Position.model_construct(
                steps=self._position.steps + 1,
                rows=self._position.rows + self._plan.global_batch_size,
                lanes=tuple(
                    shares[lane].positions[number] if lane in shares else UNKNOWN
                    for lane in range(self._lanes_of_job)
                ),
            )
            positions_after += [*before_last, self._position]
        return positions_after

    def _take_share(self, number: int, lane: "_Lane", steps: int) -> "_LaneShare":
        """Take a lane's sequences of the next steps."""
        batch_size = self._plan.global_batch_size
        lanes = self._lanes_of_job
        first = (number - self._position.rows) % lanes
        # Sequences that the lane has given after each step.
        counts = [
            max(0, -(-((step + 1) * batch_size - first) // lanes))
            for step in range(steps)
        ]
        position_before = lane.position
        segments, positions = lane.take(counts[-1])
        segments.sequences[:] = first + lanes * segments.sequences
        position_after_count = [position_before, *positions.tolist()]
        return _LaneShare(
            segments=segments,
            # A lane behind its last epoch gave fewer sequences than it was asked for.
            positions=[
                position_after_count[min(count, len(positions))] for count in counts
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaneShare:
    """What one lane contributes to some steps."""

    segments: Segments
    """Samples, whose sequences are numbered from 0 over all lanes in turn."""
    positions: list[int]
    """Position of the lane after each step."""


class _Lane:
    """Sequences of one lane, block after block, with the next block packed ahead."""

    def __init__(
        self,
        plan: BatchPlan,
        dataset: TokenDataset,
        number: int,
        position: int,
        packer: Executor | None,
    ) -> None:
        if position == UNKNOWN:
            raise ValueError(
                f"the position says nothing of lane {number}, which holds rows of this"
                " rank"
            )
        self._plan = plan
        self._dataset = dataset
        self._number = number
        self._packer = packer
        self._block_samples = plan.block_samples
        self._block, self._sequence = divmod(position, self._block_samples)
        self._segments: Segments | None = None
        self._sequences_in_block = 0
        self._pack_next = self._start_packing(self._block)

    @property
    def position(self) -> int:
        """Position of the lane, as in ``Position.lanes``."""
        return self._block * self._block_samples + self._sequence

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
            part_size = min(count - taken, self._sequences_in_block - self._sequence)
            part_begin, part_end = np.searchsorted(
                block.sequences, (self._sequence, self._sequence + part_size)
            )
            part = Segments(block.table[:, part_begin:part_end].copy())
            part.sequences[:] += taken - self._sequence
            parts.append(part)
            positions.append(self.position + np.arange(1, part_size + 1))
            taken += part_size
            self._sequence += part_size
            if self._sequence == self._sequences_in_block:
                self._leave_block()
                positions[-1][-1] = self.position
        return Segments.join(parts), np.concatenate(positions)

    def _leave_block(self) -> None:
        self._block += 1
        self._sequence = 0
        self._segments = None

    def _current_block(self) -> Segments | None:
        """Return the block that holds the next sequence, or None after the last epoch.

        Raises:
            ValueError: If the position does not exist in this plan.
        """
        while self._segments is None:
            if self._pack_next is None:
                return None
            segments = self._pack_next()
            self._segments = segments
            self._sequences_in_block = (
                int(segments.sequences[-1]) + 1 if len(segments) else 0
            )
            if self._sequence > self._sequences_in_block:
                raise ValueError(
                    f"row {self._sequence} of a block of {self._sequences_in_block}"
                    " rows: the position is of another plan"
                )
            self._pack_next = self._start_packing(self._block + 1)
            if not self._sequences_in_block:
                self._block += 1
                self._segments = None
        return self._segments

    def _start_packing(self, block: int) -> Callable[[], Segments] | None:
        """Start packing a block, or defer it until its samples are requested.

        Return a function that returns the packed block, or None after the last epoch.
        """
        if self._plan.has_ended(block):
            return None
        # A cold disk fetches this lane's lengths while others are packed, or while
        # earlier sequences are in use.
        self._dataset.prefetch_offsets(
            lambda: self._plan.samples_of(self._number, block)[1]
        )
        pack = functools.partial(
            lay_out, self._plan, self._number, block, self._dataset
        )
        if self._packer is None:
            return pack
        return self._packer.submit(pack).result
