"""What a report is made of, before it has a format: sections of words, tables and charts. Pure.

Nothing here is escaped or shortened: that is the business of each format, which does it to every text alike.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autotune.show.charts.drawing import Drawing
from autotune.show.tables import Row, inert

LONG_TABLE_ROWS = 24
"""A table with more has a window of its own."""
MOST_CELL_LETTERS = 240
MOST_WORDS_LETTERS = 600
"""Texts of strangers end there: a report is read by people."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A command or a key, letter by letter."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strong:
    """What a reader should not miss."""

    text: str


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
class LeftOut:
    """There is more than people read: how much of it stands here, and where the rest is."""

    what: str
    """In the plural: ``training runs``."""
    shown: int
    of: int
    which: str = "the first"
    where: str = "the JSON file beside this one"


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
    """A part with a title; sections in it are its parts."""

    title: str
    key: str
    """Of its anchor; of the whole document's sections each has another."""
    blocks: "tuple[Block, ...]"
    badge: str | None = None
    """One word before the title."""


Block = Paragraph | Missing | LeftOut | Bullets | Pairs | Table | Chart | Section


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


def left_out_words(block: LeftOut) -> str:
    """In one sentence."""
    return f"{block.shown:,} of {block.of:,} {block.what} are shown here, {block.which}; {block.where} has all."


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def first_of(
    many: Sequence[T], most: int, what: str, *, first: Callable[[T], bool] | None = None, which: str = "the first"
) -> tuple[Sequence[T], tuple[Block, ...]]:
    """As many as fit, in their own order, and a note if that is not all of them.

    Args:
        many: All of them.
        most: So many fit.
        what: They are, in the plural.
        first: Selects those that come before others if not all fit.
        which: Says which are shown.
    """
    if len(many) <= most:
        return many, ()
    ranked = sorted(range(len(many)), key=lambda number: first is not None and not first(many[number]))
    kept = [many[number] for number in sorted(ranked[:most])]
    return kept, (LeftOut(what=what, shown=most, of=len(many), which=which),)
