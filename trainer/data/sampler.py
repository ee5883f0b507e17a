"""Micro-batch plans of one rank, in order, from any position in the data.

Plans are made a little ahead of their use.
"""

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from trainer.data.array_types import Int64
from trainer.data.batch_plan import BatchPlan
from trainer.data.dataset import TokenDataset
from trainer.data.lane import Lane
from trainer.data.position import UNKNOWN, Position
from trainer.data.segments import Segments

SEQUENCES_PLANNED_TOGETHER = 1024
"""Sequences up to which steps are planned together: a plan costs the same for 64
sequences as for 1,024."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaneShare:
    """Sequences that one lane contributes to the steps that are planned together."""

    segments: Segments
    """Samples. Their sequences are numbered over all lanes of the job, from 0 for the
    first sequence of these steps."""
    position_after_step: list[int]
    """Position of the lane after each of the steps."""


class SequenceSampler:
    """Endless iterator over the micro-batch plans of one rank.

    There are ``gradient_accumulation_steps`` of them per optimizer step.
    """

    def __init__(
        self,
        plan: BatchPlan,
        dataset: TokenDataset,
        rank: int,
        position: Position | None = None,
        *,
        packs_ahead: bool = False,
    ) -> None:
        """Start at a position.

        Args:
            plan: Plan of the whole job.
            dataset: Dataset that is planned for.
            rank: Rank whose micro-batches are planned.
            position: Position that knows the lanes of ``rank``; None for the start of
                the data.
            packs_ahead: Whether a thread packs each block before it is needed, which
                hides a slow disk. If this process reads the samples as well, the thread
                only competes with it.
        """
        self._plan = plan
        self._rank = rank
        # Read here once, as the plan computes its properties at each access.
        self._lanes_of_job = plan.lanes
        self._sequences_per_micro_batch = plan.sequences_per_micro_batch
        self._position = position or Position.start(plan)
        packer = None
        if packs_ahead:
            # One thread: blocks are packed while earlier ones are in use, and do not
            # compete with each other.
            packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packer")
        self._lanes = {
            lane: Lane(plan, dataset, lane, self._position.lanes[lane], packer)
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
        shares = {
            lane_number: self._take_share(lane_number, lane, steps)
            for lane_number, lane in self._lanes.items()
        }
        segments = Segments.join([share.segments for share in shares.values()])
        # Lanes also hold sequences of other ranks, which take those of a step in turn.
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
        micro_batches = self._split_into_micro_batches(
            segments, step, number_in_rank, steps
        )
        plans: list[MicroBatchPlan] = []
        for step_index in range(steps):
            self._position = self._position_after(step_index, shares)
            first = step_index * plan.gradient_accumulation_steps
            last = first + plan.gradient_accumulation_steps - 1
            plans += [
                MicroBatchPlan(segments=micro_batch, after=None)
                for micro_batch in micro_batches[first:last]
            ]
            plans.append(
                MicroBatchPlan(segments=micro_batches[last], after=self._position)
            )
        return plans

    def _take_share(self, lane_number: int, lane: Lane, steps: int) -> _LaneShare:
        """Take a lane's sequences of the next steps."""
        lanes = self._lanes_of_job
        # The job takes sequences from its lanes in turn, and has taken ``rows`` so far.
        # So this is the number, in the next steps, of this lane's first sequence.
        first_number = (lane_number - self._position.rows) % lanes
        # Sequences that are needed of this lane until the end of each step.
        needed_sequences: list[int] = []
        for step in range(steps):
            later_numbers = (step + 1) * self._plan.global_batch_size - first_number
            # The quotient is rounded up.
            needed_sequences.append(max(0, -(-later_numbers // lanes)))
        position_before = lane.position
        segments, positions = lane.take(needed_sequences[-1])
        segments.sequences[:] = first_number + lanes * segments.sequences
        position_after_sequences = [position_before, *positions.tolist()]
        # A lane past its last epoch gave fewer sequences than were needed.
        given_sequences = len(positions)
        return _LaneShare(
            segments=segments,
            position_after_step=[
                position_after_sequences[min(needed, given_sequences)]
                for needed in needed_sequences
            ],
        )

    def _position_after(
        self, step_index: int, shares: Mapping[int, _LaneShare]
    ) -> Position:
        """Return the position of the job after one more step.

        Args:
            step_index: Index of this step in the shares.
            shares: Shares of this rank's lanes, by the number of the lane.
        """
        lanes = [UNKNOWN] * self._lanes_of_job
        for lane_number, share in shares.items():
            lanes[lane_number] = share.position_after_step[step_index]
        # Not validated, as that would cost a fifth of a small step's plan.
        return Position.model_construct(
            steps=self._position.steps + 1,
            rows=self._position.rows + self._plan.global_batch_size,
            lanes=tuple(lanes),
        )

    def _split_into_micro_batches(
        self, segments: Segments, step: Int64, number_in_rank: Int64, steps: int
    ) -> list[Segments]:
        """Split this rank's samples into micro-batches.

        Args:
            segments: Samples of all steps; their sequences are renumbered.
            step: Step of each sample's sequence, counted from 0, shape (N,).
            number_in_rank: Number of each sample's sequence among those that this rank
                has in the step, shape (N,).
            steps: Number of steps.

        Returns:
            The samples of each micro-batch, as described in ``MicroBatchPlan``.
        """
        accumulation_steps = self._plan.gradient_accumulation_steps
        micro_batch_in_step, sequence = np.divmod(
            number_in_rank, self._sequences_per_micro_batch
        )
        micro_batch = step * accumulation_steps + micro_batch_in_step
        segments.sequences[:] = sequence
        order = np.lexsort((segments.positions, sequence, micro_batch))
        segments = segments[order]
        edges = np.searchsorted(
            micro_batch[order], np.arange(steps * accumulation_steps + 1)
        ).tolist()
        return [segments[begin:end] for begin, end in itertools.pairwise(edges)]
