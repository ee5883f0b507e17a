"""Micro-batch plans of one rank, in order, from any position, packed a little ahead of their use."""

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

ROWS_AT_ONCE = 1024
"""Sequences up to which steps are planned together: a plan costs the same for 64
sequences as for 1,024."""
UNKNOWN = -1
"""Position of a lane that this rank does not follow."""


class Position(StrictTable):
    """Position of the whole job in the data, as in a checkpoint.

    Valid for any number of ranks and workers.
    """

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
    if any(
        (position.steps, position.rows) != (first.steps, first.rows)
        for position in positions
    ):
        raise ValueError("positions of different steps")
    lanes = tuple(
        max(places)
        for places in zip(*(position.lanes for position in positions), strict=True)
    )
    if UNKNOWN in lanes:
        raise ValueError(f"no rank follows lane {lanes.index(UNKNOWN)}")
    return Position(steps=first.steps, rows=first.rows, lanes=lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """One micro-batch of one rank.

    Sequences without a segment are empty and add no loss.
    """

    segments: Segments
    """Samples sorted by sequence and column; sequences are numbered within the
    micro-batch."""
    after: Position | None
    """Position of the job after this optimizer step; only with the last micro-batch of
    a step."""


class SequenceSampler:
    """Endless iterator over the micro-batch plans of one rank, ``gradient_accumulation_steps`` per optimizer step.

    The ``position`` must know the lanes of ``rank``. With ``ahead``, a thread packs
    each block before it is needed, which hides a slow disk; if this process reads the
    samples as well, the thread only competes with it.
    """

    def __init__(
        self,
        plan: BatchPlan,
        index: TokenDataset,
        rank: int,
        position: Position | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self._plan, self._rank = plan, rank
        self._lanes_of_job, self._rows_of_micro_batch = (
            plan.lanes,
            plan.sequences_per_micro_batch,
        )
        self._position = position or Position.start(plan)
        # One thread: blocks are packed while earlier ones are in use, and do not
        # compete with each other.
        packer = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="packer")
            if ahead
            else None
        )
        places = self._position.lanes
        self._lanes = {
            lane: _Lane(plan, index, lane, places[lane], packer)
            for lane in plan.lanes_of(rank)
        }

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        steps = 1  # so that the first batch does not wait for others
        while True:
            yield from self._next_steps(steps)
            steps = max(1, min(2 * steps, ROWS_AT_ONCE // self._plan.global_batch_size))

    def _next_steps(self, steps: int) -> list[MicroBatchPlan]:
        plan = self._plan
        # The numbers of these sequences in the order of the whole job begin at
        # ``position.rows``; here they begin at 0.
        taken = {
            number: self._take(number, lane, steps)
            for number, lane in self._lanes.items()
        }
        segments = Segments.join([rows for rows, _ in taken.values()])
        step, in_step = np.divmod(segments.rows, plan.global_batch_size)
        mine = in_step % plan.world_size == self._rank
        segments, step, in_rank = (
            segments[mine],
            step[mine],
            in_step[mine] // plan.world_size,
        )
        if plan.layout == "bucketed":
            # Sequences of like length get neighbouring numbers, so the same
            # micro-batch. Those of a step stay the same.
            by_length = np.lexsort((segments.tokens, step))
            segments, step = segments[by_length], step[by_length]
            in_rank = np.arange(len(step)) - np.searchsorted(step, step)
        part, row = np.divmod(in_rank, self._rows_of_micro_batch)
        micro_batch = step * plan.gradient_accumulation_steps + part
        segments.rows[:] = row
        order = np.lexsort((segments.columns, row, micro_batch))
        edges = np.searchsorted(
            micro_batch[order], np.arange(steps * plan.gradient_accumulation_steps + 1)
        ).tolist()
        segments = segments[order]
        before_last = [None] * (plan.gradient_accumulation_steps - 1)
        after: list[Position | None] = []
        for number in range(steps):
            # As a check costs a fifth of a small step's plan.
            self._position = Position.model_construct(
                steps=self._position.steps + 1,
                rows=self._position.rows + plan.global_batch_size,
                lanes=tuple(
                    taken[lane][1][number] if lane in taken else UNKNOWN
                    for lane in range(self._lanes_of_job)
                ),
            )
            after += [*before_last, self._position]
        pairs = zip(itertools.pairwise(edges), after, strict=True)
        return [
            MicroBatchPlan(segments=segments[first:end], after=position)
            for (first, end), position in pairs
        ]

    def _take(
        self, number: int, lane: "_Lane", steps: int
    ) -> tuple[Segments, list[int]]:
        """Return a lane's sequences of the next steps, numbered from 0 over all lanes in turn, and its positions."""
        rows, lanes = self._plan.global_batch_size, self._lanes_of_job
        first = (number - self._position.rows) % lanes
        before = lane.place
        counts = [
            max(0, -(-((step + 1) * rows - first) // lanes)) for step in range(steps)
        ]
        segments, places = lane.take(counts[-1])
        segments.rows[:] = first + lanes * segments.rows
        known = [before, *places.tolist()]
        # A lane behind its last epoch gave fewer sequences than it was asked for.
        return segments, [known[min(count, len(places))] for count in counts]


class _Lane:
    """Sequences of one lane, block after block, with the next block packed ahead."""

    def __init__(
        self,
        plan: BatchPlan,
        index: TokenDataset,
        lane: int,
        place: int,
        packer: Executor | None,
    ) -> None:
        if place == UNKNOWN:
            raise ValueError(
                f"the position says nothing of lane {lane}, which holds rows of this"
                " rank"
            )
        self._plan, self._index, self._lane, self._packer = plan, index, lane, packer
        self._block_samples = plan.block_samples
        self._block, self._row = divmod(place, self._block_samples)
        self._segments: Segments | None = None
        self._rows = 0
        self._next = self._pack(self._block)

    @property
    def place(self) -> int:
        """Blocks consumed times the plan's ``block_samples`` plus sequences consumed of the current one."""
        return self._block * self._block_samples + self._row

    def take(self, count: int) -> tuple[Segments, Int64]:
        """Return the next ``count`` sequences, numbered from 0, and the position after each; fewer at the end."""
        taken: list[Segments] = []
        places: list[Int64] = []
        rows = 0
        while rows < count:
            block = self._current()
            if block is None:
                break
            here = min(count - rows, self._rows - self._row)
            first, end = np.searchsorted(block.rows, (self._row, self._row + here))
            part = Segments(block.table[:, first:end].copy())
            part.rows[:] += rows - self._row
            taken.append(part)
            places.append(self.place + np.arange(1, here + 1))
            rows += here
            self._row += here
            if self._row == self._rows:
                self._block, self._row, self._segments = self._block + 1, 0, None
                places[-1][-1] = self.place
        return Segments.join(taken), np.concatenate(
            [np.zeros(0, dtype=np.int64), *places]
        )

    def _current(self) -> Segments | None:
        """Return the block that holds the next sequence, or None after the last epoch."""
        while self._segments is None:
            if self._next is None:
                return None
            self._segments = self._next()
            self._rows = int(self._segments.rows[-1]) + 1 if len(self._segments) else 0
            if self._row > self._rows:
                raise ValueError(
                    f"row {self._row} of a block of {self._rows} rows: the position is"
                    " of another plan"
                )
            self._next = self._pack(self._block + 1)
            if not self._rows:
                self._block, self._segments = self._block + 1, None
        return self._segments

    def _pack(self, block: int) -> Callable[[], Segments] | None:
        """Start packing a block, or defer it until called.

        Return None after the last epoch.
        """
        if self._plan.ended(block):
            return None
        # A cold disk fetches this lane's lengths while others are packed, or while
        # earlier sequences are in use.
        self._index.announce(lambda: self._plan.samples_of(self._lane, block)[1])
        if self._packer is None:
            return functools.partial(
                lay_out, self._plan, self._lane, block, self._index
            )
        return self._packer.submit(
            lay_out, self._plan, self._lane, block, self._index
        ).result
