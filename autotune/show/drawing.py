"""What a chart shows, before anybody draws it: values with their intervals, names and units. Pure.

Values may be infinite, as in files of others: those are not drawn.
"""

from dataclasses import dataclass
from typing import Literal

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
    """Its lower end; by itself when None."""


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
    colour: int = 0
    """Number of its colour."""


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
