"""Position of a job in the data, which its ranks save and resume from."""

from typing import Annotated

from pydantic import Field

from trainer.data.batch_plan import BatchPlan
from trainer.formats.tables import StrictTable

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
    """Sequences that the job has consumed, empty ones included."""
    lanes: Annotated[tuple[int, ...], Field(strict=False)]
    """Position of each lane; ``UNKNOWN`` for a lane of other ranks.

    It is the number of blocks consumed times the plan's ``block_samples``, plus the
    sequences consumed of the current block, which alone is packed again to resume."""

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
    # Ranks that follow a lane agree on its position, and those that do not have
    # ``UNKNOWN``, which is the lowest value.
    lanes_of_ranks = [position.lanes for position in positions]
    lanes = tuple(max(lane) for lane in zip(*lanes_of_ranks, strict=True))
    if UNKNOWN in lanes:
        raise ValueError(f"no rank follows lane {lanes.index(UNKNOWN)}")
    return Position(steps=first.steps, rows=first.rows, lanes=lanes)
