"""Renderers of a document: for a terminal, as Markdown, and as one HTML file without scripts or external resources."""

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
from autotune.base.svg import drawn
from autotune.base.tables import (
    escape_markdown,
    markdown_table,
    printable_line,
    text_table,
)

_DEEPEST = 6
"""Levels of headings that Markdown and HTML support."""
_SHORT_LETTERS, _LONG_WORD_LETTERS = 14, 26


def console_text(blocks: Sequence[doc.Block]) -> str:
    """Return a command's output for a terminal, tables and sections set apart.

    Charts become their tables.
    """
    groups = itertools.groupby(
        blocks, lambda block: isinstance(block, doc.Table | doc.Chart | doc.Section)
    )
    return "\n\n".join(
        ("\n\n" if apart else "\n").join(map(_on_console, group))
        for apart, group in groups
    )


def _on_console(block: doc.Block) -> str:
    match block:
        case doc.Paragraph():
            return _line(block.words)
        case doc.Missing():
            run = (
                f" (run: {', then '.join(map(printable_line, block.commands))})"
                if block.commands
                else ""
            )
            return f"{printable_line(block.subject)}: {block.state}{run}"
        case doc.Bullets():
            return "\n".join(_line(item) for item in block.items)
        case doc.Pairs():
            return "\n".join(f"{name}: {_line(words)}" for name, words in block.pairs)
        case doc.Table():
            caption = f"{printable_line(block.caption)}\n" if block.caption else ""
            head, _, rows = text_table(
                block.headers, block.rows, block.align
            ).partition("\n")
            return caption + (
                rows if block.headers == FACTS else f"{head}\n{rows}".rstrip("\n")
            )
        case doc.Chart():
            return _on_console(replace(block.table, caption=block.title))
        case doc.Section():
            return f"{printable_line(block.title)}\n{textwrap.indent(console_text(block.blocks), '  ')}"
        case doc.SideBySide():
            return console_text(block.blocks)


def _line(words: doc.Words) -> str:
    return render_words(words, printable_line, printable_line, printable_line)


def markdown_text(blocks: Sequence[doc.Block]) -> str:
    """Return blocks as Markdown without a final newline."""
    return "\n\n".join(part for block in blocks for part in _in_markdown(block, 2))


def report_markdown(document: doc.Document) -> str:
    """Return the whole report as Markdown.

    Charts become their titles, descriptions and tables.
    """
    parts = [f"# {_inert(document.title)}", _sentences(document.subtitle)]
    for number, section in enumerate(document.sections, start=1):
        parts += _in_markdown(section, 2, f"{number}. ")
    return "\n\n".join(parts) + "\n"


def _in_markdown(block: doc.Block, level: int, number: str = "") -> list[str]:
    match block:
        case doc.Paragraph():
            return [_words(block.words)]
        case doc.Missing():
            commands = ", then ".join(_code(command) for command in block.commands)
            return [
                f"{_inert(block.subject)}: {block.state}"
                + (f" (run: {commands})." if commands else ".")
            ]
        case doc.Bullets():
            return ["\n".join(f"- {_words(item)}" for item in block.items)]
        case doc.Pairs():
            return [
                "\n".join(
                    f"- **{_inert(name)}**: {_words(words)}"
                    for name, words in block.pairs
                )
            ]
        case doc.Table():
            headers = [shortened(header) for header in block.headers]
            rows = [
                [None if cell is None else shortened(cell) for cell in row]
                for row in block.rows
            ]
            return [
                f"*{_inert(block.caption)}*",
                markdown_table(headers, rows, align=block.align),
            ]
        case doc.Chart():
            said = f"**{_inert(block.title)}.** {_sentences(block.description)}"
            return [
                said,
                "<details><summary>Data table</summary>",
                *_in_markdown(block.table, level),
                "</details>",
            ]
        case doc.Section():
            badge = f"({block.badge}) " if block.badge else ""
            title = (
                f"{'#' * min(level, _DEEPEST)} {number}{badge}{_sentences(block.title)}"
            )
            return [
                title,
                *(
                    part
                    for inner in block.blocks
                    for part in _in_markdown(inner, level + 1)
                ),
            ]
        case doc.SideBySide():
            return [
                part for inner in block.blocks for part in _in_markdown(inner, level)
            ]


def _words(words: doc.Words) -> str:
    return render_words(
        words, _sentences, _code, lambda text: f"**{_sentences(text)}**"
    )


def _code(text: str) -> str:
    """Return text in backticks, or in ``<code>`` if it needs entities, which are decoded only in the element."""
    plain, safe = shortened(text, MAX_TEXT_CHARACTERS), _sentences(text)
    return f"`{plain}`" if plain == safe else f"<code>{safe}</code>"


def _sentences(text: str) -> str:
    return _inert(text, MAX_TEXT_CHARACTERS)


def _inert(text: str, most: int = MAX_CELL_CHARACTERS) -> str:
    return escape_markdown(shortened(text, most))


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
    charts = itertools.count(1)
    numbers = (
        f'<span class="number">{number}</span> ' for number in itertools.count(1)
    )
    first, *others = (
        _in_html(section, 2, charts, next(numbers)) for section in document.sections
    )
    items = "".join(
        f'<li><a href="#{escape(one.key)}">{_escaped(one.title)}</a></li>'
        for one in document.sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme"'
        ' content="light dark">\n'
        f"<title>{_escaped(document.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n<header><h1>{_escaped(document.title)}</h1>\n"
        f"<p>{_escaped_words(document.subtitle)}</p></header>\n"
        f'{first}<nav aria-label="Contents"><p>Contents</p><ol>{items}</ol></nav>\n'
        f"{''.join(others)}</main>\n</body>\n</html>\n"
    )


def _in_html(
    block: doc.Block, level: int, charts: Iterator[int], number: str = ""
) -> str:
    match block:
        case doc.Paragraph():
            kind = ' class="headline"' if block.large else ""
            return f"<p{kind}>{_html_words(block.words)}</p>\n"
        case doc.Missing():
            commands = "".join(
                f"<li>{_html_code(command)}</li>" for command in block.commands
            )
            run = f" Run:</p><ol>{commands}</ol>" if commands else "</p>"
            said = f"{_escaped_words(block.subject)}: <strong>{block.state}.</strong>"
            return f'<div class="missing"><p>{said}{run}</div>\n'
        case doc.Bullets():
            return f"<ul>{''.join(f'<li>{_html_words(item)}</li>' for item in block.items)}</ul>\n"
        case doc.Pairs():
            pairs = "".join(
                f"<dt>{_escaped(name)}</dt><dd>{_html_words(words)}</dd>"
                for name, words in block.pairs
            )
            return f"<dl>{pairs}</dl>\n"
        case doc.Table():
            return _html_table(block)
        case doc.Chart():
            title, description = (
                shortened(block.title),
                shortened(block.description, MAX_TEXT_CHARACTERS),
            )
            key = f"chart-{next(charts)}"
            svg = drawn(
                block.drawing,
                key=key,
                title=title,
                description=description,
                small=block.small,
            )
            label = f'role="group" tabindex="0" aria-label="Chart: {escape(title)}"'
            caption = f"<figcaption>{escape(title)}</figcaption>"
            data = (
                "<details><summary>Data"
                f" table</summary>{_html_table(block.table)}</details>"
            )
            return (
                f'<figure>{caption}<div class="box"'
                f" {label}>{svg}</div></figure>\n{data}\n"
            )
        case doc.Section():
            kind = badge = ""
            if block.badge is not None:
                name = _escaped(block.badge)
                kind, badge = (
                    ' class="card"',
                    f'<span class="badge {name}">{name}</span> ',
                )
            title = f"<h{level}>{number}{badge}{_escaped_words(block.title)}</h{level}>"
            body = "".join(
                _in_html(inner, min(level + 1, _DEEPEST), charts)
                for inner in block.blocks
            )
            return (
                f'<section id="{escape(block.key)}"{kind}>\n{title}\n{body}</section>\n'
            )
        case doc.SideBySide():
            inner = (
                "".join(_in_html(one, level, charts) for one in group)
                for group in block.groups
            )
            return (
                "<div"
                f' class="beside">{"".join(f"<div>{group}</div>" for group in inner)}</div>\n'
            )


def _html_table(table: doc.Table) -> str:
    sides = table.align.ljust(len(table.headers), "l")
    classes = [' class="r"' if side == "r" else "" for side in sides]
    columns = zip(table.headers, classes, strict=False)
    heads = "".join(
        f'<th scope="col"{kind}>{_escaped(header)}</th>' for header, kind in columns
    )
    rows = "".join(
        f"<tr>{''.join(map(_cell, row, sides))}</tr>\n" for row in table.rows
    )
    kind, name = ("box long" if table.long else "box"), _escaped(table.caption)
    return (
        f'<div class="{kind}" role="group" tabindex="0" aria-label="Table:'
        f' {name}"><table><caption>{name}</caption>'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )


def _cell(cell: str | None, side: str) -> str:
    """Return a cell.

    One with a word too long for a column may break anywhere, the others only between
    words.
    """
    text = shortened(cell)
    is_wide = max(map(len, text.split()), default=0) > _LONG_WORD_LETTERS
    kind = (
        "w"
        if is_wide
        else "r"
        if side == "r"
        else "t"
        if len(text) > _SHORT_LETTERS
        else ""
    )
    return (
        f'<td class="{kind}">{escape(text)}</td>'
        if kind
        else f"<td>{escape(text)}</td>"
    )


def _html_words(words: doc.Words) -> str:
    return render_words(
        words,
        _escaped_words,
        _html_code,
        lambda text: f"<strong>{_escaped_words(text)}</strong>",
    )


def _html_code(text: str) -> str:
    return f"<code>{_escaped_words(text)}</code>"


def _escaped_words(text: str) -> str:
    return _escaped(text, MAX_TEXT_CHARACTERS)


def _escaped(text: str | None, most: int = MAX_CELL_CHARACTERS) -> str:
    return escape(shortened(text, most))
