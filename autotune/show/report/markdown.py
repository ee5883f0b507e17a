"""A report as Markdown."""

from autotune.show.report.document import (
    MOST_WORDS_LETTERS,
    Block,
    Bullets,
    Chart,
    Code,
    Document,
    LeftOut,
    Missing,
    Pairs,
    Paragraph,
    Section,
    Strong,
    Table,
    Words,
    left_out_words,
    shown,
)
from autotune.show.tables import markdown_inert, markdown_table

_DEEPEST = 6
"""Levels of titles that Markdown knows."""


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
        case LeftOut():
            return [_inert(left_out_words(block), MOST_WORDS_LETTERS)]
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
    parts = []
    for part in words:
        match part:
            case Code():
                parts.append(_code(part.text))
            case Strong():
                parts.append(f"**{_inert(part.text, MOST_WORDS_LETTERS)}**")
            case str():
                parts.append(_inert(part, MOST_WORDS_LETTERS))
    return "".join(parts)


def _code(text: str) -> str:
    """Within backticks, if nothing in it needs an entity: those are read within the element only."""
    plain, safe = shown(text, MOST_WORDS_LETTERS), _inert(text, MOST_WORDS_LETTERS)
    return f"`{plain}`" if plain == safe else f"<code>{safe}</code>"


def _inert(text: str, most: int = 240) -> str:
    return markdown_inert(shown(text, most))
