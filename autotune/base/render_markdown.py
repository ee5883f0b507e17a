"""Documents as Markdown."""

from collections.abc import Sequence

from autotune.base import document as doc
from autotune.base.document import (
    DEEPEST_HEADING,
    MAX_CELL_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    render_words,
    shortened,
)
from autotune.base.tables import escape_markdown, markdown_table

_TOP_LEVEL = 2
"""Level of headings of sections that are in no other section; the title has level 1."""


def markdown_text(blocks: Sequence[doc.Block]) -> str:
    """Return blocks as Markdown without a final newline."""
    return "\n\n".join(_markdown_parts(blocks, _TOP_LEVEL))


def report_markdown(document: doc.Document) -> str:
    """Return the whole report as Markdown.

    Charts become their titles, descriptions and tables.
    """
    parts = [f"# {_markdown_cell(document.title)}", _markdown_plain(document.subtitle)]
    for number, section in enumerate(document.sections, start=1):
        parts += _markdown_section(section, _TOP_LEVEL, f"{number}. ")
    return "\n\n".join(parts) + "\n"


def _markdown_parts(blocks: Sequence[doc.Block], level: int) -> list[str]:
    """Return the parts of blocks, between which Markdown has an empty line.

    Args:
        blocks: The blocks.
        level: Level of the headings of sections among them.
    """
    parts: list[str] = []
    for block in blocks:
        parts += _markdown_block(block, level)
    return parts


def _markdown_block(block: doc.Block, level: int) -> list[str]:
    """Return the parts of one block; arguments are as for ``_markdown_parts``."""
    match block:
        case doc.Paragraph():
            return [_markdown_words(block.words)]
        case doc.Missing():
            message = f"{_markdown_cell(block.subject)}: {block.state}"
            if block.commands:
                commands = ", then ".join(map(_markdown_code, block.commands))
                message += f" (run: {commands})"
            return [f"{message}."]
        case doc.Bullets():
            return ["\n".join(f"- {_markdown_words(item)}" for item in block.items)]
        case doc.Pairs():
            items = (
                f"- **{_markdown_cell(name)}**: {_markdown_words(words)}"
                for name, words in block.pairs
            )
            return ["\n".join(items)]
        case doc.Table():
            return _markdown_table(block)
        case doc.Chart():
            title = _markdown_cell(block.title)
            description = _markdown_plain(block.description)
            return [
                f"**{title}.** {description}",
                "<details><summary>Data table</summary>",
                *_markdown_table(block.table),
                "</details>",
            ]
        case doc.Section():
            return _markdown_section(block, level)
        case doc.SideBySide():
            return _markdown_parts(block.blocks, level)


def _markdown_section(section: doc.Section, level: int, number: str = "") -> list[str]:
    """Return the parts of a section.

    Args:
        section: The section.
        level: Level of its heading.
        number: Text in front of the title, such as ``1. ``.
    """
    hashes = "#" * min(level, DEEPEST_HEADING)
    badge = f"({section.badge}) " if section.badge else ""
    heading = f"{hashes} {number}{badge}{_markdown_plain(section.title)}"
    return [heading, *_markdown_parts(section.blocks, level + 1)]


def _markdown_table(table: doc.Table) -> list[str]:
    headers = [shortened(header) for header in table.headers]
    rows = [
        [None if cell is None else shortened(cell) for cell in row]
        for row in table.rows
    ]
    return [
        f"*{_markdown_cell(table.caption)}*",
        markdown_table(headers, rows, align=table.align),
    ]


def _markdown_words(words: doc.Words) -> str:
    return render_words(
        words,
        render_plain=_markdown_plain,
        render_code=_markdown_code,
        render_strong=_markdown_strong,
    )


def _markdown_strong(text: str) -> str:
    return f"**{_markdown_plain(text)}**"


def _markdown_code(text: str) -> str:
    """Return text in backticks, or in ``<code>`` if it needs entities.

    Markdown decodes entities in the HTML element, but not in backticks.
    """
    line = shortened(text, MAX_TEXT_CHARACTERS)
    escaped = _markdown_plain(text)
    return f"`{line}`" if line == escaped else f"<code>{escaped}</code>"


def _markdown_plain(text: str) -> str:
    return escape_markdown(shortened(text, MAX_TEXT_CHARACTERS))


def _markdown_cell(text: str) -> str:
    return escape_markdown(shortened(text, MAX_CELL_CHARACTERS))
