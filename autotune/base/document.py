"""Content of command output and reports before it has a format.

A document has sections of text, tables and charts, which ``render`` turns into text for
a terminal, Markdown or HTML.

Nothing here is escaped or shortened: each format does that to every text alike.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from autotune.base.tables import Row, printable_line

LONG_TABLE_ROWS = 24
"""Number of rows above which a table scrolls in its own area."""
FACTS = ("what", "value")
"""Headers of a table of names and values; a terminal omits them."""
MAX_CELL_CHARACTERS = 240
"""Longest cell of a table; longer ones, as untrusted files may hold, are cut."""
MAX_TEXT_CHARACTERS = 600
"""Longest part of running text; longer ones are cut."""
DEEPEST_HEADING = 6
"""Levels of headings that Markdown and HTML support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A command or a key, shown verbatim."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strong:
    """Emphasised text."""

    text: str


_T = TypeVar("_T")
TextFormat = Callable[[str], str]
"""Function that renders one part of running text in some format."""
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

    subject: str
    """Name of the part."""
    state: str = "not measured"
    """Short text about why it is missing."""
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


# Charts hold values with their intervals, names and units. Infinite values, which
# untrusted files may hold, are not drawn.
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
class ReferenceLine:
    """A reference value, drawn as a line across the chart."""

    value: float
    """Position on the axis."""
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """A shaded range of the horizontal axis."""

    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A line chart; bounds are bars at dots, and bands around lines."""

    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    shade: Shade | None = None
    rules: tuple[ReferenceLine, ...] = ()
    """Horizontal lines, at values of the vertical axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a bar chart."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    value_text: str = ""
    """Text at the end of the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Horizontal bars from zero, one below the other."""

    axis: Axis
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar of a stacked bar chart."""

    label: str
    parts: tuple[tuple[str, float], ...]
    """Name and size of each part; the same name has the same colour in all bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBarChart:
    """Horizontal stacked bars, one below the other."""

    axis: Axis
    stacks: tuple[Stack, ...]
    rules: tuple[ReferenceLine, ...] = ()
    """Vertical lines, at values of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramBin:
    """One bar of a histogram."""

    start: float
    end: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A histogram."""

    x: Axis
    y: Axis
    bins: tuple[HistogramBin, ...]
    rules: tuple[ReferenceLine, ...] = ()
    """Vertical lines, at values of the horizontal axis."""


Drawing = LineChart | BarChart | StackedBarChart | Histogram


def has_values(drawing: Drawing) -> bool:
    """Return whether a drawing has anything to show beside its axes."""
    match drawing:
        case LineChart():
            points = [point for line in drawing.lines for point in line.points]
            return any(math.isfinite(point.x + point.y) for point in points)
        case BarChart():
            return bool(drawing.bars)
        case StackedBarChart():
            parts = [part for stack in drawing.stacks for part in stack.parts]
            return any(math.isfinite(size) and size > 0 for _, size in parts)
        case Histogram():
            return any(bin.height > 0 for bin in drawing.bins)


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
class SideBySide:
    """Groups of blocks beside each other, or below each other if there is no room."""

    groups: "tuple[tuple[Block, ...], ...]"

    @property
    def blocks(self) -> "tuple[Block, ...]":
        """Blocks of all groups."""
        return tuple(block for group in self.groups for block in group)


Block = Paragraph | Missing | Bullets | Pairs | Table | Chart | Section | SideBySide


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A complete report."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def shortened(text: str | None, max_characters: int = MAX_CELL_CHARACTERS) -> str:
    """Return one line without control characters, cut after this many characters."""
    line = printable_line(text)
    if len(line) <= max_characters:
        return line
    return f"{line[:max_characters]}… ({len(line):,} characters)"


def render_words(
    words: Words, text: TextFormat, code: TextFormat, strong: TextFormat
) -> str:
    """Return running text in one format.

    Args:
        words: The parts of the text.
        text: Renders a plain part.
        code: Renders a verbatim part.
        strong: Renders an emphasised part.
    """
    rendered: list[str] = []
    for part in words:
        match part:
            case Code():
                rendered.append(code(part.text))
            case Strong():
                rendered.append(strong(part.text))
            case _:
                rendered.append(text(part))
    return "".join(rendered)


def sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    text = text.strip()
    end = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{end}"


def paragraph(text: str) -> Paragraph:
    """Return a paragraph of plain text."""
    return Paragraph(words=(text,))


def bulleted(lines: Iterable[str]) -> Bullets:
    """Return a bulleted list with each line as a sentence."""
    return Bullets(items=tuple((sentence(line),) for line in lines))


def table_of(
    caption: str,
    items: Iterable[_T],
    *columns: tuple[str, str, Callable[[_T], str | None]],
    long: bool = False,
) -> Table:
    """Return a table with a row for each item.

    Args:
        caption: Title of the table.
        items: Values, one per row.
        columns: Header of each column, its alignment (``l`` or ``r``), and the function
            that returns the cell of an item.
        long: True if the table scrolls in its own area on a screen.
    """
    headers = tuple(header for header, _, _ in columns)
    align = "".join(side for _, side, _ in columns)
    rows = tuple([cell(item) for _, _, cell in columns] for item in items)
    return Table(caption=caption, headers=headers, rows=rows, align=align, long=long)


def facts_table(caption: str, rows: Sequence[Row]) -> Table:
    """Return a table of names and values."""
    return Table(caption=caption, headers=FACTS, rows=tuple(rows))


def answer_json(answer: object) -> str:
    """Return an answer as JSON whose keys are the names of its fields.

    Properties are left out.
    """
    return json.dumps(jsonable(answer), indent=2)


def jsonable(answer: object) -> Any:
    """Return the value as dictionaries, lists and scalars."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(answer)
