"""What a chart shows, before anybody draws it: values with their intervals, names and units. Pure."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["count", "share", "bytes", "plain"]
"""How an axis is written: with thousands separators, as per cent, in the binary unit that fits, or as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What is drawn along one side."""

    label: str
    unit: Unit = "plain"
    log: Literal[2, 10] | None = None
    """Base of its logarithm; None for a linear one."""
    ticks: tuple[float, ...] = ()
    """Where it is marked; by itself when empty."""
    low: float | None = None
    high: float | None = None
    """Its ends; by itself when None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value with the bounds that belong to it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points that belong together."""

    name: str
    points: tuple[Point, ...]
    kind: Literal["line", "dots", "joined", "dotted"] = "joined"
    """A line, dots alone, dots on a line, or a thin dotted line without a name."""
    colour: int | None = None
    """Number of a colour; lines without one take the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A value that others are held against."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """A stretch of the horizontal axis."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Values along an axis; bounds are bars at dots, and bands at lines."""

    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    shade: Shade | None = None
    rules: tuple[Rule, ...] = ()
    """Across, at values of the vertical axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One value of several that are compared."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    shown: str = ""
    """Written at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars from nought, one below the other."""

    axis: Axis
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar that is made of parts."""

    label: str
    parts: tuple[tuple[str, float], ...]
    """Name and size; the same name has the same colour in all bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Horizontal bars of parts, one below the other."""

    axis: Axis
    stacks: tuple[Stack, ...]
    rules: tuple[Rule, ...] = ()
    """Upright, at values of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """How much there is from one place to another."""

    start: float
    end: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A histogram."""

    x: Axis
    y: Axis
    columns: tuple[Column, ...]
    rules: tuple[Rule, ...] = ()
    """Upright, at values of the horizontal axis."""


Drawing = Lines | Bars | Stacks | Columns


def without_infinite(drawing: Drawing) -> Drawing:
    """Without what is not finite and so has no place in a chart; files may hold such numbers."""
    kept: Drawing = _finite(drawing)
    return kept


def _finite(value: Any) -> Any:  # noqa: ANN401 - any part of a drawing
    """Parts of lists are left out; of one value's bounds, both."""
    if isinstance(value, tuple):
        return tuple(_finite(part) for part in value if _is_finite(part))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changes = {field.name: _finite(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if not all(_is_finite(changes.get(name)) for name in ("low", "high")):
        changes |= {"low": None, "high": None}
    if not _is_finite(changes.get("shade")):
        changes["shade"] = None
    return dataclasses.replace(value, **changes)


def _is_finite(value: object) -> bool:
    """Whether a number, or all that a part of a drawing must have, is finite."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, tuple):
        return all(_is_finite(part) for part in value)
    required = ("x", "y", "value", "at", "start", "end")
    return all(math.isfinite(getattr(value, name, 0.0)) for name in required if not isinstance(value, Lines | Columns))
