"""Renderers of a document: for a terminal, as Markdown, and as one HTML file.

The HTML file has no scripts and no external resources.
"""

import base64
import hashlib
import importlib.resources
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from autotune.base import document as doc
from autotune.base.document import (
    FACTS,
    MAX_CELL_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    render_words,
    shortened,
)
from autotune.base.svg import render_svg
from autotune.base.tables import (
    escape_markdown,
    markdown_table,
    printable_line,
    terminal_columns,
    text_table,
)

_INDENT = "  "
_DEEPEST_HEADING = 6
"""Levels of headings that Markdown and HTML support."""
_SHORT_CELL_CHARACTERS = 14
"""Length of a cell above which the style sheet keeps its column wide."""
_LONG_WORD_CHARACTERS = 26
"""Longest word for which a column has room."""


def console_text(blocks: Sequence[doc.Block]) -> str:
    """Return a command's output for a terminal, tables and sections set apart.

    Charts become their tables. Tables fit the terminal on standard output, if any.
    """
    return _console_blocks(blocks, terminal_columns())


def _console_blocks(blocks: Sequence[doc.Block], max_columns: int | None) -> str:
    """Return blocks as text, with tables of at most ``max_columns``, if not None."""
    parts = []
    for is_set_apart, group in itertools.groupby(blocks, _is_set_apart):
        gap = "\n\n" if is_set_apart else "\n"
        parts.append(gap.join(_console_block(block, max_columns) for block in group))
    return "\n\n".join(parts)


def _is_set_apart(block: doc.Block) -> bool:
    return isinstance(block, doc.Table | doc.Chart | doc.Section)


def _console_block(block: doc.Block, max_columns: int | None) -> str:
    match block:
        case doc.Paragraph():
            return _console_words(block.words)
        case doc.Missing():
            message = f"{printable_line(block.subject)}: {block.state}"
            if block.commands:
                commands = ", then ".join(map(printable_line, block.commands))
                message += f" (run: {commands})"
            return message
        case doc.Bullets():
            return "\n".join(_console_words(item) for item in block.items)
        case doc.Pairs():
            return "\n".join(
                f"{name}: {_console_words(words)}" for name, words in block.pairs
            )
        case doc.Table():
            return _console_table(block, max_columns)
        case doc.Chart():
            table = replace(block.table, caption=block.title)
            return _console_table(table, max_columns)
        case doc.Section():
            if max_columns is not None:
                max_columns -= len(_INDENT)
            body = textwrap.indent(_console_blocks(block.blocks, max_columns), _INDENT)
            return f"{printable_line(block.title)}\n{body}"
        case doc.SideBySide():
            return _console_blocks(block.blocks, max_columns)


def _console_table(table: doc.Table, max_columns: int | None) -> str:
    text = text_table(
        table.headers,
        table.rows,
        table.align,
        max_columns=max_columns,
        # Facts are pairs already, and their headers are left out.
        always_columns=table.headers == FACTS,
    )
    if table.headers == FACTS:
        _, _, text = text.partition("\n")
    else:
        text = text.rstrip("\n")
    return f"{printable_line(table.caption)}\n{text}" if table.caption else text


def _console_words(words: doc.Words) -> str:
    return render_words(words, printable_line, printable_line, printable_line)


def markdown_text(blocks: Sequence[doc.Block]) -> str:
    """Return blocks as Markdown without a final newline."""
    return "\n\n".join(_markdown_parts(blocks, 2))


def report_markdown(document: doc.Document) -> str:
    """Return the whole report as Markdown.

    Charts become their titles, descriptions and tables.
    """
    parts = [f"# {_markdown_cell(document.title)}", _markdown_plain(document.subtitle)]
    for number, section in enumerate(document.sections, start=1):
        parts += _markdown_section(section, 2, f"{number}. ")
    return "\n\n".join(parts) + "\n"


def _markdown_parts(blocks: Sequence[doc.Block], level: int) -> list[str]:
    """Return the parts of blocks, between which Markdown has an empty line."""
    parts: list[str] = []
    for block in blocks:
        parts += _markdown_block(block, level)
    return parts


def _markdown_block(block: doc.Block, level: int) -> list[str]:
    match block:
        case doc.Paragraph():
            return [_markdown_words(block.words)]
        case doc.Missing():
            message = f"{_markdown_cell(block.subject)}: {block.state}"
            if block.commands:
                message += (
                    f" (run: {', then '.join(map(_markdown_code, block.commands))})"
                )
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
    hashes = "#" * min(level, _DEEPEST_HEADING)
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
    return render_words(words, _markdown_plain, _markdown_code, _markdown_strong)


def _markdown_strong(text: str) -> str:
    return f"**{_markdown_plain(text)}**"


def _markdown_code(text: str) -> str:
    """Return text in backticks, or in ``<code>`` if it needs entities.

    Entities are decoded only in the element.
    """
    line = shortened(text, MAX_TEXT_CHARACTERS)
    escaped = _markdown_plain(text)
    return f"`{line}`" if line == escaped else f"<code>{escaped}</code>"


def _markdown_plain(text: str) -> str:
    return escape_markdown(shortened(text, MAX_TEXT_CHARACTERS))


def _markdown_cell(text: str) -> str:
    return escape_markdown(shortened(text, MAX_CELL_CHARACTERS))


def report_html(document: doc.Document) -> str:
    """Return the whole report as an HTML page.

    Every text is escaped here, and nowhere before.
    """
    style = (
        importlib.resources.files("autotune.base")
        .joinpath("page.css")
        .read_text(encoding="utf-8")
    )
    # The policy allows only this very style, and nothing else of any kind.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action"
        " 'none'"
    )
    chart_numbers = itertools.count(1)
    first_section, *other_sections = (
        _html_section(
            section, 2, chart_numbers, f'<span class="number">{number}</span> '
        )
        for number, section in enumerate(document.sections, start=1)
    )
    contents = "".join(
        f'<li><a href="#{escape(section.key)}">{_html_cell(section.title)}</a></li>'
        for section in document.sections
    )
    title = _html_cell(document.title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n<header><h1>{title}</h1>\n"
        f"<p>{_html_plain(document.subtitle)}</p></header>\n"
        f"{first_section}"
        f'<nav aria-label="Contents"><p>Contents</p><ol>{contents}</ol></nav>\n'
        f"{''.join(other_sections)}</main>\n</body>\n</html>\n"
    )


def _html_blocks(
    blocks: Sequence[doc.Block], level: int, chart_numbers: Iterator[int]
) -> str:
    """Return blocks as HTML.

    Args:
        blocks: The blocks.
        level: Level of the headings of sections among them.
        chart_numbers: Numbers of the next charts, from which their ids are made.
    """
    return "".join(_html_block(block, level, chart_numbers) for block in blocks)


def _html_block(block: doc.Block, level: int, chart_numbers: Iterator[int]) -> str:
    match block:
        case doc.Paragraph():
            attribute = ' class="headline"' if block.large else ""
            return f"<p{attribute}>{_html_words(block.words)}</p>\n"
        case doc.Missing():
            return _html_missing(block)
        case doc.Bullets():
            items = "".join(f"<li>{_html_words(item)}</li>" for item in block.items)
            return f"<ul>{items}</ul>\n"
        case doc.Pairs():
            pairs = "".join(
                f"<dt>{_html_cell(name)}</dt><dd>{_html_words(words)}</dd>"
                for name, words in block.pairs
            )
            return f"<dl>{pairs}</dl>\n"
        case doc.Table():
            return _html_table(block)
        case doc.Chart():
            return _html_chart(block, f"chart-{next(chart_numbers)}")
        case doc.Section():
            return _html_section(block, level, chart_numbers)
        case doc.SideBySide():
            groups = "".join(
                f"<div>{_html_blocks(group, level, chart_numbers)}</div>"
                for group in block.groups
            )
            return f'<div class="beside">{groups}</div>\n'


def _html_missing(missing: doc.Missing) -> str:
    subject = _html_plain(missing.subject)
    message = f"<p>{subject}: <strong>{missing.state}.</strong>"
    if missing.commands:
        items = "".join(
            f"<li>{_html_code(command)}</li>" for command in missing.commands
        )
        message += f" Run:</p><ol>{items}</ol>"
    else:
        message += "</p>"
    return f'<div class="missing">{message}</div>\n'


def _html_chart(chart: doc.Chart, key: str) -> str:
    title = shortened(chart.title)
    name = escape(title)
    data = (
        f"<details><summary>Data table</summary>{_html_table(chart.table)}</details>\n"
    )
    if not doc.has_values(chart.drawing):
        return f"<p>{name}: no chart, because there are no values to draw.</p>\n{data}"
    svg = render_svg(
        chart.drawing,
        key=key,
        title=title,
        description=shortened(chart.description, MAX_TEXT_CHARACTERS),
        small=chart.small,
    )
    return (
        f"<figure><figcaption>{name}</figcaption>"
        f'<div class="box" role="group" tabindex="0" aria-label="Chart: {name}">'
        f"{svg}</div></figure>\n{data}"
    )


def _html_section(
    section: doc.Section, level: int, chart_numbers: Iterator[int], number: str = ""
) -> str:
    attribute = ""
    badge = ""
    if section.badge is not None:
        name = _html_cell(section.badge)
        attribute = ' class="card"'
        badge = f'<span class="badge {name}">{name}</span> '
    heading = f"{number}{badge}{_html_plain(section.title)}"
    body = _html_blocks(section.blocks, min(level + 1, _DEEPEST_HEADING), chart_numbers)
    return (
        f'<section id="{escape(section.key)}"{attribute}>\n'
        f"<h{level}>{heading}</h{level}>\n{body}</section>\n"
    )


def _html_table(table: doc.Table) -> str:
    sides = table.align.ljust(len(table.headers), "l")
    head = "".join(
        _html_header(header, side)
        for header, side in zip(table.headers, sides, strict=False)
    )
    rows = "".join(
        f"<tr>{''.join(map(_html_table_cell, row, sides))}</tr>\n" for row in table.rows
    )
    box = "box long" if table.long else "box"
    name = _html_cell(table.caption)
    return (
        f'<div class="{box}" role="group" tabindex="0" aria-label="Table: {name}">'
        f"<table><caption>{name}</caption>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )


def _html_header(header: str, side: str) -> str:
    attribute = ' class="r"' if side == "r" else ""
    return f'<th scope="col"{attribute}>{_html_cell(header)}</th>'


def _html_table_cell(cell: str | None, side: str) -> str:
    """Return a cell with the class by which the style sheet breaks and aligns it.

    A cell with a word too long for a column may break anywhere (``w``), the others only
    between words: figures are right-aligned (``r``), and longer texts get a wide column
    (``t``).
    """
    text = shortened(cell)
    longest_word = max(map(len, text.split()), default=0)
    if longest_word > _LONG_WORD_CHARACTERS:
        kind = "w"
    elif side == "r":
        kind = "r"
    elif len(text) > _SHORT_CELL_CHARACTERS:
        kind = "t"
    else:
        return f"<td>{escape(text)}</td>"
    return f'<td class="{kind}">{escape(text)}</td>'


def _html_words(words: doc.Words) -> str:
    return render_words(words, _html_plain, _html_code, _html_strong)


def _html_strong(text: str) -> str:
    return f"<strong>{_html_plain(text)}</strong>"


def _html_code(text: str) -> str:
    return f"<code>{_html_plain(text)}</code>"


def _html_plain(text: str) -> str:
    return escape(shortened(text, MAX_TEXT_CHARACTERS))


def _html_cell(text: str) -> str:
    return escape(shortened(text, MAX_CELL_CHARACTERS))
