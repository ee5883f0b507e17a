"""Content of command output and reports before it has a format.

A document has sections of text, tables and charts. ``render_console``,
``render_markdown`` and ``render_html`` turn them into text for a terminal, Markdown or
HTML.

Nothing here is escaped or shortened: each renderer does that to every text alike.
Charts may hold infinite values from untrusted files, which are not drawn.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from autotune.base.tables import Row, printable_line

LONG_TABLE_ROWS = 24
"""Number of rows above which a report makes a table ``long``."""
FACTS = ("what", "value")
"""Headers of a table of names and values; ``render_console`` omits them."""
MAX_CELL_CHARACTERS = 240
"""Longest cell of a table; longer ones, as untrusted files may hold, are cut."""
MAX_TEXT_CHARACTERS = 600
"""Longest part of running text; longer ones are cut."""
DEEPEST_HEADING = 6
"""Lowest level of headings that Markdown and HTML support; the title has level 1."""

ItemT = TypeVar("ItemT")
"""Value from which ``table_of`` makes a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A command or a key, shown verbatim."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strong:
    """Emphasised text."""

    text: str


RenderText = Callable[[str], str]
"""Function that renders one part of running text in some format."""
Words = tuple[str | Code | Strong, ...]
"""Running text: plain parts (``str``), verbatim and emphasised ones, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A paragraph of running text."""

    words: Words
    large: bool = False
    """True if HTML shows the paragraph as a headline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part of a report that was not measured, with commands that would measure it."""

    subject: str
    """Name of the part."""
    state: str = "not measured"
    """Reason why the part is missing, in a few words."""
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
    """Each name with its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a caption and headers."""

    caption: str
    """Title of the table; if it is empty, a terminal shows none."""
    headers: tuple[str, ...]
    """Header of each column."""
    rows: tuple[Row, ...]
    """Rows with one cell per column; a missing cell shows as n/a."""
    align: str = ""
    """Alignment, one letter per column: ``l`` (left) or ``r`` (right). Columns beyond
    its end are left-aligned."""
    long: bool = False
    """True if HTML shows the table in an area that scrolls; on paper the table is
    complete."""


Unit = Literal["count", "share", "bytes", "plain"]
"""Format of an axis: ``count`` has thousands separators, ``share`` is in per cent,
``bytes`` has the binary unit that fits, and ``plain`` four significant digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a chart."""

    label: str
    """Name of the axis, without the unit of bytes."""
    unit: Unit = "plain"
    """Format of the values."""
    log: Literal[2, 10] | None = None
    """Base of a logarithmic axis; None for a linear one."""
    ticks: tuple[float, ...] = ()
    """Positions of the ticks; chosen automatically if empty."""
    low: float | None = None
    """Lower end of the axis; chosen automatically if None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a line chart, perhaps with bounds."""

    x: float
    y: float
    low: float | None = None
    """Lower bound of ``y``; None if there is none."""
    high: float | None = None
    """Upper bound of ``y``; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The points of one series."""

    name: str
    """Name in the legend."""
    points: tuple[Point, ...]
    """Points from left to right."""
    kind: Literal["line", "dots", "joined", "dotted"] = "joined"
    """Style: ``line`` has no dots, ``dots`` no line, ``joined`` has dots on a line, and
    ``dotted`` is a thin dotted line that has no entry in the legend."""
    colour: int = 0
    """Index into the palette."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLine:
    """A reference value, drawn as a line across the chart."""

    value: float
    """Position on the axis."""
    label: str
    """Name in the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """A shaded range of the horizontal axis."""

    start: float
    """Lower end of the range."""
    end: float
    """Upper end of the range."""
    label: str
    """Name in the legend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A line chart.

    Bounds are drawn as a band around a ``line``, else as a bar at each dot.
    """

    x: Axis
    """Horizontal axis."""
    y: Axis
    """Vertical axis."""
    lines: tuple[Line, ...]
    shade: Shade | None = None
    """Range of the horizontal axis to shade; None for none."""
    reference_lines: tuple[ReferenceLine, ...] = ()
    """Horizontal lines, at values of the vertical axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a bar chart."""

    label: str
    """Name beside the bar."""
    value: float
    """Length of the bar on the axis."""
    low: float | None = None
    """Lower bound of the value; None if there is none."""
    high: float | None = None
    """Upper bound of the value; None if there is none."""
    value_text: str = ""
    """Text at the end of the bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Horizontal bars from zero, the first one on top."""

    axis: Axis
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One bar of a stacked bar chart."""

    label: str
    """Name beside the bar."""
    parts: tuple[tuple[str, float], ...]
    """Name and size of each part, from zero outwards; the same name has the same colour
    in all bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBarChart:
    """Horizontal stacked bars from zero, the first one on top."""

    axis: Axis
    stacks: tuple[Stack, ...]
    reference_lines: tuple[ReferenceLine, ...] = ()
    """Vertical lines, at values of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramBin:
    """One bar of a histogram, which covers a range of the horizontal axis."""

    start: float
    """Lower end of the range."""
    end: float
    """Upper end of the range."""
    height: float
    """Height of the bar on the vertical axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A histogram: bars without gaps, as high as each range is frequent."""

    x: Axis
    """Horizontal axis."""
    y: Axis
    """Vertical axis."""
    bins: tuple[HistogramBin, ...]
    reference_lines: tuple[ReferenceLine, ...] = ()
    """Vertical lines, at values of the horizontal axis."""


Drawing = LineChart | BarChart | StackedBarChart | Histogram


def has_values(drawing: Drawing) -> bool:
    """Return whether a drawing has anything to show besides its axes."""
    match drawing:
        case LineChart():
            return any(_has_finite_point(line) for line in drawing.lines)
        case BarChart():
            return bool(drawing.bars)
        case StackedBarChart():
            return any(_has_visible_part(stack) for stack in drawing.stacks)
        case Histogram():
            return any(drawn_bin.height > 0 for drawn_bin in drawing.bins)


def _has_finite_point(line: Line) -> bool:
    return any(math.isfinite(point.x + point.y) for point in line.points)


def _has_visible_part(stack: Stack) -> bool:
    return any(math.isfinite(size) and size > 0 for _, size in stack.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with a table of the same figures."""

    title: str
    description: str
    """Description for readers who cannot see the drawing."""
    drawing: Drawing
    """The drawing, which only HTML shows."""
    table: Table
    """Figures of the drawing; the only form of the chart in a terminal and Markdown."""
    small: bool = False
    """True if the drawing is made for half the width of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled part of a document."""

    title: str
    key: str
    """Anchor of the section in HTML, unique in the document."""
    blocks: "tuple[Block, ...]"
    badge: str | None = None
    """Word in front of the title, such as a severity; None if there is none."""


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
    """Return the text as one line, cut after ``max_characters``; ``n/a`` for None.

    Control characters are written out. A line that is cut ends with its full length.
    """
    line = printable_line(text)
    if len(line) <= max_characters:
        return line
    return f"{line[:max_characters]}… ({len(line):,} characters)"


def render_words(
    words: Words,
    *,
    render_plain: RenderText,
    render_code: RenderText,
    render_strong: RenderText,
) -> str:
    """Return running text in the format of these three functions."""
    rendered: list[str] = []
    for part in words:
        match part:
            case Code():
                rendered.append(render_code(part.text))
            case Strong():
                rendered.append(render_strong(part.text))
            case _:
                rendered.append(render_plain(part))
    return "".join(rendered)


def sentence(text: str) -> str:
    """Return the text with a capital letter, and a full stop if it has no end mark."""
    text = text.strip()
    full_stop = "" if text.endswith((".", "!", "?")) else "."
    return f"{text[:1].upper()}{text[1:]}{full_stop}"


def paragraph(text: str) -> Paragraph:
    """Return a paragraph of plain text."""
    return Paragraph(words=(text,))


def bulleted(lines: Iterable[str]) -> Bullets:
    """Return a bulleted list with each line as a sentence."""
    return Bullets(items=tuple((sentence(line),) for line in lines))


def table_of(
    caption: str,
    items: Iterable[ItemT],
    *columns: tuple[str, str, Callable[[ItemT], str | None]],
    long: bool = False,
) -> Table:
    """Return a table with a row for each item.

    Args:
        caption: Title of the table.
        items: Values, one per row.
        columns: A tuple per column: its header, its alignment (``l`` or ``r``), and the
            function that returns the cell of an item.
        long: As for ``Table``.
    """
    headers = tuple(header for header, _, _ in columns)
    align = "".join(side for _, side, _ in columns)
    rows = tuple([cell_of(item) for _, _, cell_of in columns] for item in items)
    return Table(caption=caption, headers=headers, rows=rows, align=align, long=long)


def facts_table(caption: str, rows: Sequence[Row]) -> Table:
    """Return a table of names and values, a row of both for each fact."""
    return Table(caption=caption, headers=FACTS, rows=tuple(rows))
