"""A document as text: for a terminal, and as Markdown."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from autotune.show.document import (
    FACTS,
    MOST_CELL_LETTERS,
    MOST_WORDS_LETTERS,
    Block,
    Bullets,
    Chart,
    Document,
    Missing,
    Pairs,
    Paragraph,
    Section,
    Table,
    Words,
    rendered,
    shown,
)
from autotune.show.tables import inert, markdown_inert, markdown_table, text_table

_DEEPEST = 6
"""Levels of titles that Markdown knows."""


def console_text(blocks: Sequence[Block]) -> str:
    """Return a command's answer for people, tables and sections set apart; charts are their tables."""
    lines: list[str] = []
    apart = False
    for block in blocks:
        stands_alone = isinstance(block, Table | Chart | Section)
        lines += [""] * (bool(lines) and (apart or stands_alone)) + [_on_console(block)]
        apart = stands_alone
    return "\n".join(lines)


def _on_console(block: Block) -> str:
    match block:
        case Paragraph():
            return _line(block.words)
        case Missing():
            would = f" ({' and then '.join(map(inert, block.commands))} would)" if block.commands else ""
            return f"{inert(block.what)}: {block.state}{would}"
        case Bullets():
            return "\n".join(_line(item) for item in block.items)
        case Pairs():
            return "\n".join(f"{name}: {_line(words)}" for name, words in block.pairs)
        case Table():
            caption = f"{inert(block.caption)}\n" if block.caption else ""
            head, _, rows = text_table(block.headers, block.rows, block.align).partition("\n")
            return caption + (rows if block.headers == FACTS else f"{head}\n{rows}".rstrip("\n"))
        case Chart():
            return _on_console(replace(block.table, caption=block.title))
        case Section():
            body = textwrap.indent(console_text(block.blocks), "  ")
            return f"{inert(block.title)}\n{body}"


def _line(words: Words) -> str:
    return rendered(words, inert, code=inert, strong=inert)


def report_markdown(document: Document) -> str:
    """The whole report; charts are their titles, what they show, and their tables."""
    parts = [f"# {_inert(document.title)}", _inert(document.subtitle, MOST_WORDS_LETTERS)]
    for number, section in enumerate(document.sections, start=1):
        parts += _section(section, 2, f"{number}. ")
    return "\n\n".join(parts) + "\n"


def _section(section: Section, level: int, number: str = "") -> list[str]:
    badge = f"({section.badge}) " if section.badge else ""
    parts = [f"{'#' * min(level, _DEEPEST)} {number}{badge}{_inert(section.title, MOST_WORDS_LETTERS)}"]
    for block in section.blocks:
        parts += _section(block, level + 1) if isinstance(block, Section) else _block(block)
    return parts


def _block(block: Block) -> list[str]:
    match block:
        case Paragraph():
            return [_words(block.words)]
        case Missing():
            return [_missing(block)]
        case Bullets():
            return ["\n".join(f"- {_words(item)}" for item in block.items)]
        case Pairs():
            return ["\n".join(f"- **{_inert(name)}**: {_words(words)}" for name, words in block.pairs)]
        case Table():
            return _table(block)
        case Chart():
            said = _inert(block.description, MOST_WORDS_LETTERS)
            return [f"**{_inert(block.title)}.** {said}", *_table(block.table)]
        case Section():
            return _section(block, _DEEPEST)


def _missing(block: Missing) -> str:
    commands = " and then ".join(_code(command) for command in block.commands)
    return f"{_inert(block.what)}: {block.state}" + (f" ({commands} would)." if commands else ".")


def _table(table: Table) -> list[str]:
    headers = [shown(header) for header in table.headers]
    rows = [[None if cell is None else shown(cell) for cell in row] for row in table.rows]
    return [f"*{_inert(table.caption)}*", markdown_table(headers, rows, align=table.align)]


def _words(words: Words) -> str:
    return rendered(words, _sentences, code=_code, strong=lambda text: f"**{_sentences(text)}**")


def _code(text: str) -> str:
    """Within backticks, if nothing in it needs an entity: those are read within the element only."""
    plain, safe = shown(text, MOST_WORDS_LETTERS), _sentences(text)
    return f"`{plain}`" if plain == safe else f"<code>{safe}</code>"


def _sentences(text: str) -> str:
    return _inert(text, MOST_WORDS_LETTERS)


def _inert(text: str, most: int = MOST_CELL_LETTERS) -> str:
    return markdown_inert(shown(text, most))
