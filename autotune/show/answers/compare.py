"""What ``autotune report compare --json`` answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autotune.decide.changes import Change
from autotune.decide.comparison import Compared, Comparison, Gate, Kind, Side, Verdict
from autotune.decide.difference import Estimate
from autotune.decide.statistics import SHOWN_CONFIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """A profile, a tuning or a run."""

    kind: Kind
    name: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedField:
    """One field that differs; null on the side that does not have it."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedEstimate:
    """A figure of one side, in the unit of the comparison."""

    value: float
    low: float | None
    high: float | None
    confidence: float
    """With which the bounds hold it."""
    n: int
    """Readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedChange:
    """What B is of A, or what it is more."""

    value: float
    low: float | None
    high: float | None
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One figure of both sides."""

    name: str
    unit: str
    of: str
    """What it was read at, such as ``16 rows``."""
    a: ComparedEstimate
    b: ComparedEstimate
    change: ComparedChange
    change_is: Literal["ratio", "points"]
    """``points``: the difference of two shares."""
    verdict: Verdict
    why: str
    """Why there is no verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareAnswer:
    """Two profiles, tunings or runs, and which differences are beyond noise."""

    a: ComparedSide
    b: ComparedSide
    gate: Gate | None
    """Null without ``--fail-if-slower``."""
    headline: ComparedFigure | None
    """How fast they train."""
    circumstances: tuple[ChangedField, ...]
    """Model, data and place."""
    settings: tuple[ChangedField, ...]
    facts: tuple[ChangedField, ...]
    """Machine and software."""
    figures: tuple[ComparedFigure, ...]
    only_a: tuple[str, ...]
    """Figures that the other side does not have."""
    only_b: tuple[str, ...]


def compare_answer(found: Comparison, gate: Gate | None) -> CompareAnswer:
    """The comparison, figure by figure."""
    return CompareAnswer(
        a=_side(found.a),
        b=_side(found.b),
        gate=gate,
        headline=None if found.headline is None else _figure(found.headline),
        circumstances=_changes(found.circumstances),
        settings=_changes(found.settings),
        facts=_changes(found.facts),
        figures=tuple(_figure(one) for one in found.figures),
        only_a=found.only_a,
        only_b=found.only_b,
    )


def _side(side: Side) -> ComparedSide:
    return ComparedSide(kind=side.kind, name=side.name, notes=side.notes)


def _figure(one: Compared) -> ComparedFigure:
    change = one.change
    return ComparedFigure(
        name=one.metric.name,
        unit=one.metric.unit,
        of=one.of,
        a=_estimate(one.a),
        b=_estimate(one.b),
        change=ComparedChange(value=change.value, low=change.low, high=change.high, confidence=SHOWN_CONFIDENCE),
        change_is="points" if one.a.scale == "linear" and one.metric.unit == "share" else "ratio",
        verdict=one.verdict,
        why=one.why,
    )


def _estimate(one: Estimate) -> ComparedEstimate:
    interval = one.interval
    return ComparedEstimate(value=one.value, low=interval.low, high=interval.high, confidence=SHOWN_CONFIDENCE, n=one.n)


def _changes(found: Sequence[Change]) -> tuple[ChangedField, ...]:
    return tuple(ChangedField(key=change.key, a=change.old, b=change.new) for change in found)
