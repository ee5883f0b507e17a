"""Documents as one HTML file without scripts and external resources."""

import base64
import hashlib
import importlib.resources
import itertools
from collections.abc import Iterator, Sequence
from html import escape

from autotune.base import document as doc
from autotune.base.document import (
    DEEPEST_HEADING,
    MAX_CELL_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    render_words,
    shortened,
)
from autotune.base.svg import render_svg
from autotune.base.tables import column_sides

_SHORT_CELL_CHARACTERS = 14
"""Length of a cell above which the style sheet keeps its column wide."""
_LONG_WORD_CHARACTERS = 26
"""Longest word for which a column has room."""


def report_html(document: doc.Document) -> str:
    """Return the whole report, of at least one section, as an HTML page.

    The table of contents follows the first section. Every text is escaped here, and
    nowhere before.
    """
    chart_numbers = itertools.count(1)
    sections = [
        _html_section(
            section,
            level=2,
            chart_numbers=chart_numbers,
            number_html=f'<span class="number">{number}</span> ',
        )
        for number, section in enumerate(document.sections, start=1)
    ]
    first_section, *other_sections = sections
    contents = "".join(
        f'<li><a href="#{escape(section.key)}">{_html_cell(section.title)}</a></li>'
        for section in document.sections
    )
    title = _html_cell(document.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n{_html_head(title)}<body>\n'
        f"<main>\n<header><h1>{title}</h1>\n"
        f"<p>{_html_plain(document.subtitle)}</p></header>\n"
        f"{first_section}"
        f'<nav aria-label="Contents"><p>Contents</p><ol>{contents}</ol></nav>\n'
        f"{''.join(other_sections)}</main>\n</body>\n</html>\n"
    )


def _html_head(title: str) -> str:
    """Return the head of the page.

    Args:
        title: Title of the page, escaped.
    """
    style = (
        importlib.resources.files("autotune.base")
        .joinpath("page.css")
        .read_text(encoding="utf-8")
    )
    # The policy allows this style, by its hash, and no other resource of any kind.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action"
        " 'none'"
    )
    return (
        '<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n"
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
    """Return one block as HTML; arguments are as for ``_html_blocks``."""
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
    """Return a chart with its table; ``key`` is the prefix of all ids in the chart."""
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
    section: doc.Section,
    level: int,
    chart_numbers: Iterator[int],
    number_html: str = "",
) -> str:
    """Return a section, in a frame if it has a badge.

    Args:
        section: The section.
        level: Level of its heading.
        chart_numbers: As for ``_html_blocks``.
        number_html: HTML in front of the title.
    """
    attribute = ""
    badge = ""
    if section.badge is not None:
        name = _html_cell(section.badge)
        attribute = ' class="card"'
        badge = f'<span class="badge {name}">{name}</span> '
    heading = f"{number_html}{badge}{_html_plain(section.title)}"
    body = _html_blocks(section.blocks, min(level + 1, DEEPEST_HEADING), chart_numbers)
    return (
        f'<section id="{escape(section.key)}"{attribute}>\n'
        f"<h{level}>{heading}</h{level}>\n{body}</section>\n"
    )


def _html_table(table: doc.Table) -> str:
    sides = column_sides(table.align, len(table.headers))
    head = "".join(
        _html_header(header, side)
        for header, side in zip(table.headers, sides, strict=True)
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

    - ``w``: a cell with a word too long for a column, which may break anywhere;
    - ``r``: another cell that is aligned to the right, such as a figure;
    - ``t``: another cell with a longer text, which gets a wide column.
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
    return render_words(
        words,
        render_plain=_html_plain,
        render_code=_html_code,
        render_strong=_html_strong,
    )


def _html_strong(text: str) -> str:
    return f"<strong>{_html_plain(text)}</strong>"


def _html_code(text: str) -> str:
    return f"<code>{_html_plain(text)}</code>"


def _html_plain(text: str) -> str:
    return escape(shortened(text, MAX_TEXT_CHARACTERS))


def _html_cell(text: str) -> str:
    return escape(shortened(text, MAX_CELL_CHARACTERS))
