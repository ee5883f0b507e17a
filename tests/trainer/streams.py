"""What tests of plans and streams share: an index of made-up lengths, and what all ranks get."""

from collections.abc import Callable
from itertools import islice

import numpy as np

from trainer.plan import SPECIAL_TOKENS_PER_SAMPLE, BatchPlan, Segments
from trainer.stream import Position, RowStream, join_positions


class Lengths:
    """A sample index over a list of lengths, all in one shard."""

    def __init__(self, lengths: list[int] | np.ndarray) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def announce(self, samples: Callable[[], np.ndarray]) -> None:
        """Everything is here already."""

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.zeros_like(samples), self._begins[samples], self._lengths[samples]


def make_plan(index: Lengths, **options) -> BatchPlan:
    defaults = {"seed": 0, "row_tokens": 64, "layout": "packed", "global_batch_rows": 8}
    defaults |= {"accumulation_steps": 1, "world_size": 1}
    return BatchPlan(dataset_samples=len(index), **defaults | options)


def all_ranks(
    index: Lengths, plan: BatchPlan, steps: int, position: Position | None = None
) -> tuple[list[list[Segments]], Position]:
    """The segments of every step, one array per micro-batch of every rank; and where the job is then."""
    found: list[list[Segments]] = [[] for _ in range(steps)]
    ends = []
    for rank in range(plan.world_size):
        stream = RowStream(plan, index, rank, position)
        last = None
        for number, micro_batch in enumerate(islice(stream, steps * plan.accumulation_steps)):
            found[number // plan.accumulation_steps].append(micro_batch.segments)
            last = micro_batch.after
        ends.append(last or position or Position.start(plan))
    return found, join_positions(ends)


def rows_of(micro_batches: list[Segments]) -> list[list[tuple[int, int, int, int]]]:
    """The content of every row of some micro-batches, whatever its number: (epoch, sample, column, tokens) of each."""
    rows = []
    for segments in micro_batches:
        for row in np.unique(segments.rows):
            inside = segments[segments.rows == row]
            fields = (inside.epochs, inside.samples, inside.columns, inside.tokens)
            rows.append(list(zip(*(field.tolist() for field in fields), strict=True)))
    return sorted(rows)


def check_places(plan: BatchPlan, segments: Segments) -> None:
    """Samples lie within their rows, in order, without overlap or gap."""
    lengths = segments.tokens + SPECIAL_TOKENS_PER_SAMPLE
    assert (segments.rows >= 0).all()
    assert (segments.rows < plan.rows_per_microbatch_per_rank).all()
    assert (segments.columns + lengths <= plan.row_tokens).all()
    flat = segments.rows * plan.row_tokens + segments.columns
    assert (np.diff(flat) >= lengths[:-1]).all()
    same_row = np.diff(segments.rows) == 0
    assert (np.diff(flat)[same_row] == lengths[:-1][same_row]).all()
