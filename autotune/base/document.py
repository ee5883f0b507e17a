"""Content of command output and reports before it has a format: sections of text, tables and charts.

Nothing here is escaped or shortened: each format does that to every text alike.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from autotune.base.tables import Row, inert

LONG_TABLE_ROWS = 24
"""Number of rows above which a table scrolls in its own area."""
FACTS = ("what", "value")
"""Headers of a table of names and values; a terminal omits them."""
MOST_CELL_LETTERS = 240
MOST_WORDS_LETTERS = 600
"""Longest text in characters; longer ones, as untrusted files may hold, are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A command or a key, shown verbatim."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strong:
    """Emphasised text."""

    text: str


_T = TypeVar("_T")
_Form = Callable[[str], str]
Words = tuple[str | Code | Strong, ...]
"""Running text, in plain, verbatim and emphasised parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A paragraph of running text."""

    words: Words
    large: bool = False
    """True if the paragraph is a headline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part that was not measured, and the commands that would measure it."""

    what: str
    state: str = "not measured"
    commands: tuple[str, ...]
    """Commands in the order in which to run them; empty if none would measure it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets:
    """A bulleted list."""

    items: tuple[Words, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Names, each with a text about it."""

    pairs: tuple[tuple[str, Words], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a caption and headers."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]
    """Rows with one cell per column; a missing cell shows as n/a."""
    align: str = ""
    """Alignment, one letter per column, ``l`` or ``r``; further columns are
    left-aligned."""
    long: bool = False
    """True if the table scrolls in its own area on a screen; it is always printed in
    full."""


# Charts: values with their intervals, names and units. Infinite values, as in untrusted
# files, are not drawn.
Unit = Literal["count", "share", "bytes", "plain"]
"""Format of an axis: with thousands separators, as per cent, in the binary unit that
fits, or as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a chart."""

    label: str
    unit: Unit = "plain"
    log: Literal[2, 10] | None = None
    """Base of a logarithmic axis; None for a linear one."""
    ticks: tuple[float, ...] = ()
    """Positions of the ticks; chosen automatically if empty."""
    low: float | None = None
    """Lower end of the axis; chosen automatically if None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value with its bounds."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The points of one series."""

    name: str
    points: tuple[Point, ...]
    kind: Literal["line", "dots", "joined", "dotted"] = "joined"
    """Style: a line, dots alone, dots on a line, or a thin dotted line without a
    name."""
    colour: int = 0
    """Index into the palette."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A reference value, drawn as a line across the chart."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """A shaded range of the horizontal axis."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A line chart; bounds are bars at dots, and bands around lines."""

    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    shade: Shade | None = None
    rules: tuple[Rule, ...] = ()
    """Horizontal lines, at values of the vertical axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a bar chart."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    shown: str = ""
    """Text at the end of the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars from zero, one below the other."""

    axis: Axis
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Horizontal stacked bars, one below the other."""

    axis: Axis
    stacks: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    """Label of each bar, and its parts by name and size; the same name has the same
    colour in all bars."""
    rules: tuple[Rule, ...] = ()
    """Vertical lines, at values of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A histogram."""

    x: Axis
    y: Axis
    columns: tuple[tuple[float, float, float], ...]
    """Start, end and height of each column."""
    rules: tuple[Rule, ...] = ()
    """Vertical lines, at values of the horizontal axis."""


Drawing = Lines | Bars | Stacks | Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with a table of the same figures."""

    title: str
    description: str
    """Description for readers who cannot see the chart."""
    drawing: Drawing
    table: Table
    small: bool = False
    """True if the drawing is made for half the width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled part of a document."""

    title: str
    key: str
    """Anchor of the section, unique in the document."""
    blocks: "tuple[Block, ...]"
    badge: str | None = None
    """Word in front of the title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Groups of blocks beside each other, or below each other if there is no room."""

    groups: "tuple[tuple[Block, ...], ...]"

    @property
    def blocks(self) -> "tuple[Block, ...]":
        """Blocks of all groups."""
        return tuple(block for group in self.groups for block in group)


Block = Paragraph | Missing | Bullets | Pairs | Table | Chart | Section | Beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A complete report."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def shown(text: str | None, most: int = MOST_CELL_LETTERS) -> str:
    """Return one line without control characters, cut after ``most`` characters."""
    plain = inert(text)
    return (
        plain if len(plain) <= most else f"{plain[:most]}… ({len(plain):,} characters)"
    )


def rendered(words: Words, text: _Form, code: _Form, strong: _Form) -> str:
    """Return running text in a format, whose functions render plain, verbatim and emphasised parts."""
    return "".join(
        (
            text(part)
            if isinstance(part, str)
            else code(part.text)
            if isinstance(part, Code)
            else strong(part.text)
        )
        for part in words
    )


def sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    text = text.strip()
    return (
        f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"
    )


def line(text: str) -> Paragraph:
    """Return a paragraph of plain text."""
    return Paragraph(words=(text,))


def told(lines: Iterable[str]) -> Bullets:
    """Return a bulleted list with each line as a sentence."""
    return Bullets(items=tuple((sentence(one),) for one in lines))


def table_of(
    caption: str,
    items: Iterable[_T],
    *columns: tuple[str, str, Callable[[_T], str | None]],
    long: bool = False,
) -> Table:
    """Return a table with a row for each item.

    A column is its header, ``l`` or ``r``, and the cell of an item.
    """
    headers, align = (
        tuple(header for header, _, _ in columns),
        "".join(side for _, side, _ in columns),
    )
    rows = tuple([cell(item) for _, _, cell in columns] for item in items)
    return Table(caption=caption, headers=headers, rows=rows, align=align, long=long)


def facts(caption: str, rows: Sequence[Row]) -> Table:
    """Return a table of names and values."""
    return Table(caption=caption, headers=FACTS, rows=tuple(rows))


def answer_json(answer: object) -> str:
    """Return one JSON value whose keys are the fields' names.

    Properties are left out.
    """
    return json.dumps(plain(answer), indent=2)


def plain(answer: object) -> Any:
    """Return the value as dictionaries, lists and scalars."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(answer)
