"""What commands and reports say, before it has a format: sections of words, tables and charts.

Nothing here is escaped or shortened: each format does that to every text alike.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from autotune.base.tables import Row, inert

LONG_TABLE_ROWS = 24
"""A table with more has a window of its own."""
FACTS = ("what", "value")
"""Headers of names and values, which a terminal does without."""
MOST_CELL_LETTERS = 240
MOST_WORDS_LETTERS = 600
"""Texts of strangers end there: a report is read by people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A command or a key, letter by letter."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strong:
    """What a reader should not miss."""

    text: str


_T = TypeVar("_T")
_Form = Callable[[str], str]
Words = tuple[str | Code | Strong, ...]
"""Running text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A few sentences."""

    words: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A part that was not measured, and the command that would."""

    what: str
    state: str = "not measured"
    commands: tuple[str, ...]
    """In this order; empty where none would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets:
    """Sentences, each with a point before it."""

    items: tuple[Words, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Names, and what is to be said of each."""

    pairs: tuple[tuple[str, Words], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under headers."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]
    """One cell per column; a missing one shows as n/a."""
    align: str = ""
    """One letter per column, ``l`` or ``r``; columns beyond it are left-aligned."""
    long: bool = False
    """Whether it has a window of its own on a screen; on paper it is whole."""


# Charts: values with their intervals, names and units. What is infinite, as in files of others, is not drawn.
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
class Stacks:
    """Horizontal bars of parts, one below the other."""

    axis: Axis
    stacks: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    """The label of each bar, and its parts by name and size; the same name has the same colour in all bars."""
    rules: tuple[Rule, ...] = ()
    """Upright, at values of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A histogram."""

    x: Axis
    y: Axis
    columns: tuple[tuple[float, float, float], ...]
    """Start, end and height of each."""
    rules: tuple[Rule, ...] = ()
    """Upright, at values of the horizontal axis."""


Drawing = Lines | Bars | Stacks | Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture with the same figures beside it."""

    title: str
    description: str
    """What it shows, for those who cannot see it."""
    drawing: Drawing
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part with a title."""

    title: str
    key: str
    """Of its anchor, unique in the document."""
    blocks: "tuple[Block, ...]"
    badge: str | None = None
    """One word before the title."""


Block = Paragraph | Missing | Bullets | Pairs | Table | Chart | Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def shown(text: str | None, most: int = MOST_CELL_LETTERS) -> str:
    """One line without control characters, cut where it is longer than anybody reads."""
    plain = inert(text)
    return plain if len(plain) <= most else f"{plain[:most]}… ({len(plain):,} characters)"


def blocks_of(section: Section | Document) -> Iterator[Block]:
    """Every block, sections and what is in them included, in reading order."""
    for block in section.sections if isinstance(section, Document) else section.blocks:
        yield block
        if isinstance(block, Section):
            yield from blocks_of(block)


def rendered(words: Words, text: _Form, *, code: _Form, strong: _Form) -> str:
    """Running text in a format, whose parts are written so."""
    return "".join(
        text(part) if isinstance(part, str) else code(part.text) if isinstance(part, Code) else strong(part.text)
        for part in words
    )


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def told(lines: Iterable[str]) -> Bullets:
    """Each line as a sentence."""
    return Bullets(items=tuple((sentence(line),) for line in lines))


def table_of(
    caption: str, items: Iterable[_T], *columns: tuple[str, str, Callable[[_T], str | None]], long: bool = False
) -> Table:
    """Return a table with a row for each item; a column is its header, ``l`` or ``r``, and the cell of an item."""
    return Table(
        caption=caption,
        headers=tuple(header for header, _, _ in columns),
        rows=tuple([cell(item) for _, _, cell in columns] for item in items),
        align="".join(side for _, side, _ in columns),
        long=long,
    )


def facts(caption: str, rows: Sequence[Row]) -> Table:
    """A table of names and values."""
    return Table(caption=caption, headers=FACTS, rows=tuple(rows))


def answer_json(answer: object) -> str:
    """One JSON value with the names of the fields; properties are left out."""
    return json.dumps(plain(answer), indent=2)


def plain(answer: object) -> Any:  # noqa: ANN401 - any JSON value
    """The same as dictionaries, lists and scalars."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(answer)
