"""Events of a run: what was saved, what went wrong, what was done about it. No torch here."""

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from trainer.schema import Table

Level = Literal["info", "warning", "error"]


class EventRow(Table):
    """Something that people may want to know of."""

    step: int
    """Optimizer steps finished when it was noticed, or the step it is about."""
    utc: str
    kind: str
    """``saved``, ``save_failed``, ``not_removed``, ``record_waits``, ``resumed``, ``damaged``, ``rolled_back``,
    ``preflight``, ``stopped``, or what ``trainer.health`` tells: ``non_finite``, ``spike``, ``explosion``, ``plateau``,
    ``rise``, ``starved``, ``straggler``."""
    level: Literal["info", "warning", "error"]
    action: str
    """What was done: ``none``, ``warn``, ``skip``, ``rollback``, ``give_up``."""
    message: str
    causes: list[str] = Field(default_factory=list)
    """Likely ones, the likeliest first."""
    next_step: str = ""
    values: dict[str, float | int | str] = Field(default_factory=dict)
    """Numbers that show it; those that are not finite as text."""
    samples: list[int] = Field(default_factory=list)
    """Numbers in the dataset of the samples of that step, of all ranks."""


def happened(
    step: int,
    kind: str,
    message: str,
    *,
    level: Level = "info",
    action: str = "none",
    causes: Sequence[str] = (),
    next_step: str = "",
    values: Mapping[str, float | int | str] | None = None,
    samples: Sequence[int] = (),
) -> EventRow:
    """An event of this moment; numbers that are not finite become text."""
    return EventRow(
        step=step,
        utc=utc_now(),
        kind=kind,
        level=level,
        action=action,
        message=message,
        causes=list(causes),
        next_step=next_step,
        values={name: _shown(value) for name, value in (values or {}).items()},
        samples=list(samples),
    )


def _shown(value: float | int | str) -> float | int | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
