"""Outcomes of trials: figures, or one of the ways in which a trial fails. Pure.

An outcome is a type and not a score: a crash must not look like a slow trial, and only
an ``OutOfMemory`` shows that a size does not fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The job completed, and these are its figures."""

    figures: dict[str, Any]
    """Figures by name, as JSON; the ``JobFigures`` of the job read them."""
    kind: Literal["measured"] = field(default="measured", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """Outcome without figures."""

    detail: str
    """Message, log or stack that shows the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(_Failed):
    """The allocator ran out of memory: the size does not fit."""

    kind: Literal["out_of_memory"] = field(default="out_of_memory", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOutOfMemory(_Failed):
    """The kernel killed the job because the host ran out of memory.

    Other programs may have used it, so this says nothing about the budget.
    """

    kind: Literal["host_out_of_memory"] = field(
        default="host_out_of_memory", init=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut(_Failed):
    """The job exceeded its time limit and was killed."""

    kind: Literal["timed_out"] = field(default="timed_out", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed(_Failed):
    """The job failed in any other way."""

    kind: Literal["crashed"] = field(default="crashed", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contaminated(_Failed):
    """The figures are discarded: another process or a slow GPU distorted them."""

    kind: Literal["contaminated"] = field(default="contaminated", init=False)


Failure = OutOfMemory | HostOutOfMemory | TimedOut | Crashed | Contaminated
Outcome = Measured | Failure

_FAILURES: Mapping[str, type[Failure]] = {
    "out_of_memory": OutOfMemory,
    "host_out_of_memory": HostOutOfMemory,
    "timed_out": TimedOut,
    "crashed": Crashed,
    "contaminated": Contaminated,
}
"""Class of each ``kind`` of failure."""
_DESCRIPTIONS = {
    "measured": "completed",
    "host_out_of_memory": "killed: host out of memory",
}
"""Descriptions of kinds whose names do not explain themselves."""


def outcome_from_json(value: dict[str, Any]) -> Outcome:
    """Read ``dataclasses.asdict`` of an outcome.

    Raises:
        ValueError: If its kind is unknown or a field is missing.
    """
    kind = value.get("kind")
    if kind == "measured":
        figures = value.get("figures")
        if isinstance(figures, dict):
            return Measured(figures=figures)
    elif isinstance(kind, str) and kind in _FAILURES:
        detail = value.get("detail")
        if isinstance(detail, str):
            return _FAILURES[kind](detail=detail)
    raise ValueError(f"not an outcome: {value!r}")


def describe(outcome: Outcome) -> str:
    """Return an outcome in a few words, for tables and progress."""
    return _DESCRIPTIONS.get(outcome.kind, outcome.kind.replace("_", " "))
