"""The steps of one rank, in order, from any position: plans for its micro-batches, packed a little ahead of use."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from trainer.plan import BLOCK_SAMPLES, SEGMENT, BatchPlan, SampleIndex, Segments, lay_out

UNKNOWN = -1
"""The place of a lane that this rank does not follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the whole job is: what a checkpoint stores. Valid for any number of ranks and loader workers.

    Args:
        steps: Optimizer steps begun.
        rows: Rows that the job has consumed.
        lanes: For each lane, blocks consumed times ``BLOCK_SAMPLES`` plus rows consumed of the block it is in; one
            integer says where to go on, and only that block is packed again. ``UNKNOWN`` for a lane of other ranks.
    """

    steps: int
    rows: int
    lanes: tuple[int, ...]

    @classmethod
    def start(cls, plan: BatchPlan) -> "Position":
        """Before the first row."""
        return cls(steps=0, rows=0, lanes=(0,) * plan.lanes)


def join_positions(positions: list[Position]) -> Position:
    """One position for the whole job, from those of ranks after the same step.

    Raises:
        ValueError: If they are not of the same step, or no rank follows some lane.
    """
    first = positions[0]
    if any((position.steps, position.rows) != (first.steps, first.rows) for position in positions):
        raise ValueError("positions of different steps")
    lanes = tuple(max(places) for places in zip(*(position.lanes for position in positions), strict=True))
    if UNKNOWN in lanes:
        raise ValueError(f"no rank follows lane {lanes.index(UNKNOWN)}")
    return Position(steps=first.steps, rows=first.rows, lanes=lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """One micro-batch of one rank; rows without a segment are empty and weigh nothing."""

    segments: Segments
    """``row`` counts within the micro-batch; sorted by row and column."""
    after: Position | None
    """Where the job is behind this micro-batch's step; only with the last micro-batch of a step."""


class RowStream:
    """An endless iterator over the micro-batch plans of one rank, ``accumulation_steps`` of them per optimizer step.

    Args:
        plan: How samples become micro-batches.
        index: The dataset's lengths.
        rank: Whose micro-batches.
        position: Where to begin; the lanes of ``rank`` must be known.
    """

    def __init__(self, plan: BatchPlan, index: SampleIndex, rank: int, position: Position | None = None) -> None:
        self._plan, self._rank = plan, rank
        self._position = position or Position.start(plan)
        # One thread: blocks are packed while earlier ones are computed, and never compete with each other.
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packer")
        self._lanes = {lane: _Lane(plan, index, lane, self._place(lane), self._packer) for lane in plan.lanes_of(rank)}

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        while True:
            yield from self._next_step()

    def _place(self, lane: int) -> int:
        place = self._position.lanes[lane]
        if place == UNKNOWN:
            raise ValueError(f"the position says nothing of lane {lane}, which holds rows of rank {self._rank}")
        return place

    def _next_step(self) -> list[MicroBatchPlan]:
        plan, done = self._plan, self._position
        parts = [self._rows_of_lane(lane, (number - done.rows) % plan.lanes) for number, lane in self._lanes.items()]
        segments = np.concatenate(parts)
        if plan.layout == "bucketed":
            # Rows of like length get neighbouring numbers, and so the same micro-batch. The step's rows stay the same.
            segments = segments[np.argsort(segments["tokens"], kind="stable")]
            segments["row"] = np.arange(len(segments))
        rows = plan.rows_per_microbatch_per_rank
        micro_batch, row = np.divmod(segments["row"], rows)
        segments["row"] = row
        order = np.lexsort((segments["column"], row, micro_batch))
        edges = np.searchsorted(micro_batch[order], np.arange(plan.accumulation_steps + 1))
        self._position = Position(
            steps=done.steps + 1,
            rows=done.rows + plan.global_batch_rows,
            lanes=tuple(self._lanes[lane].place if lane in self._lanes else UNKNOWN for lane in range(plan.lanes)),
        )
        return [
            MicroBatchPlan(
                segments=segments[order[edges[part] : edges[part + 1]]],
                after=self._position if part == plan.accumulation_steps - 1 else None,
            )
            for part in range(plan.accumulation_steps)
        ]

    def _rows_of_lane(self, lane: "_Lane", first: int) -> Segments:
        """What a lane gives this rank in one step; rows numbered over all micro-batches of the step.

        Args:
            lane: Whose rows.
            first: The lane's first row among the rows of the step; the others follow at steps of the number of lanes.
        """
        plan = self._plan
        count = -(-(plan.global_batch_rows - first) // plan.lanes) if first < plan.global_batch_rows else 0
        segments = lane.take(count)
        in_step = first + plan.lanes * segments["row"]
        mine = in_step % plan.world_size == self._rank
        own: Segments = segments[mine]
        own["row"] = in_step[mine] // plan.world_size
        return own


class _Lane:
    """One lane's rows, block after block, the next one packed ahead."""

    def __init__(self, plan: BatchPlan, index: SampleIndex, lane: int, place: int, packer: ThreadPoolExecutor) -> None:
        self._plan, self._index, self._lane, self._packer = plan, index, lane, packer
        self._block, self._row = divmod(place, BLOCK_SAMPLES)
        self._segments: Segments | None = None
        self._rows = 0
        self._ahead: Future[Segments] | None = self._pack_ahead(self._block)

    @property
    def place(self) -> int:
        """Blocks consumed times ``BLOCK_SAMPLES`` plus rows consumed of the current one."""
        return self._block * BLOCK_SAMPLES + self._row

    def take(self, count: int) -> Segments:
        """The next ``count`` rows, numbered from 0; fewer when the last epoch is over."""
        taken: list[Segments] = []
        rows = 0
        while rows < count:
            block = self._current()
            if block is None:
                break
            here = min(count - rows, self._rows - self._row)
            first, end = np.searchsorted(block["row"], (self._row, self._row + here))
            part = block[first:end].copy()
            part["row"] += rows - self._row
            taken.append(part)
            rows += here
            self._row += here
            if self._row == self._rows:
                self._block, self._row, self._segments = self._block + 1, 0, None
        result: Segments = np.concatenate([_NOTHING, *taken])
        return result

    def _current(self) -> Segments | None:
        """The block that holds the next row, or None behind the last epoch."""
        while self._segments is None:
            if self._ahead is None:
                return None
            self._segments = self._ahead.result()
            self._rows = int(self._segments["row"][-1]) + 1 if len(self._segments) else 0
            self._ahead = self._pack_ahead(self._block + 1)
            if not self._rows:
                self._block, self._segments = self._block + 1, None
        return self._segments

    def _pack_ahead(self, block: int) -> "Future[Segments] | None":
        if self._plan.ended(block):
            return None
        return self._packer.submit(lay_out, self._plan, self._lane, block, self._index)


_NOTHING = np.zeros(0, dtype=SEGMENT)
