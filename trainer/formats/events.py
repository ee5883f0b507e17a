"""Events of a run, such as saves and failures, as its record has them.

No torch here.
"""

import datetime
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from trainer.formats.tables import StrictTable


class EventRow(StrictTable):
    """Event of a run, as a line of ``events.jsonl``."""

    step: int
    """Step that the event is about, or number of steps finished when it occurred."""
    utc: str
    """Time of the event in ISO 8601, to the second."""
    kind: str
    """Kind of event: ``saved``, ``save_failed``, ``not_removed``, ``record_waits``,
    ``board_failed``, ``resumed``, ``corrupt``, ``rolled_back``, ``preflight``,
    ``stopped``, ``gpu_unread``, or the value of a ``findings.Kind``."""
    level: Literal["info", "warning", "error"] = "info"
    """Severity of the event."""
    action: str = "none"
    """Action taken: the value of a ``findings.Action``, or ``none``."""
    message: str
    """Description of the event, to be shown to you."""
    causes: list[str] = Field(default_factory=list)
    """Likely causes, most likely first."""
    next_step: str = ""
    """Instructions for you; empty if there is nothing to do."""
    values: dict[str, float | int | str] = Field(default_factory=dict)
    """Numbers behind the message, by name; non-finite ones as text."""
    samples: list[int] = Field(default_factory=list)
    """Dataset indices of the step's samples, over all ranks."""


def new_event(
    step: int,
    kind: str,
    message: str,
    *,
    values: Mapping[str, float | int | str] | None = None,
    **other_fields: Any,
) -> EventRow:
    """Return an event with the current time.

    Args:
        step: As in ``EventRow``.
        kind: As in ``EventRow``.
        message: As in ``EventRow``.
        values: Numbers behind the message, by name; non-finite ones become text, as
            JSON has no such numbers.
        other_fields: Other fields of the ``EventRow``, which have defaults.
    """
    json_values: dict[str, float | int | str] = {}
    for name, value in (values or {}).items():
        is_non_finite = isinstance(value, float) and not math.isfinite(value)
        json_values[name] = str(value) if is_non_finite else value
    return EventRow(
        step=step,
        utc=utc_now(),
        kind=kind,
        message=message,
        values=json_values,
        **other_fields,
    )


def utc_now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="seconds").replace("+00:00", "Z")
