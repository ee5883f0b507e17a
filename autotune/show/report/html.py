"""A report as one HTML file: no script, nothing from elsewhere, and a policy that would refuse both."""

import base64
import hashlib
import importlib.resources
from collections.abc import Iterator
from html import escape

from autotune.show.document import (
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
    blocks_of,
    rendered,
    shown,
)
from autotune.show.svg import drawn

_DEEPEST = 6
_SHORT_LETTERS, _LONG_WORD_LETTERS = 14, 26


def report_html(document: Document) -> str:
    """The whole page. Every text of the document is escaped here, and nowhere before."""
    style = importlib.resources.files("autotune.show.report").joinpath("page.css").read_text(encoding="utf-8")
    numbers = {id(block): number for number, block in enumerate(_charts(document), start=1)}
    first, *others = (
        _section(section, 2, numbers, number) for number, section in enumerate(document.sections, start=1)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(document.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n<header><h1>{_text(document.title)}</h1>\n"
        f"<p>{_text(document.subtitle, MOST_WORDS_LETTERS)}</p></header>\n"
        f"{first}{_contents(document)}\n{''.join(others)}</main>\n</body>\n</html>\n"
    )


def _policy(style: str) -> str:
    """Only this very style, and nothing else of any kind."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _charts(document: Document) -> Iterator[Chart]:
    return (block for block in blocks_of(document) if isinstance(block, Chart))


def _contents(document: Document) -> str:
    items = "".join(
        f'<li><a href="#{escape(section.key)}">{_text(section.title)}</a></li>' for section in document.sections
    )
    return f'<nav aria-label="Contents"><p>Contents</p><ol>{items}</ol></nav>'


def _section(section: Section, level: int, charts: dict[int, int], number: int | None = None) -> str:
    badge = (
        "" if section.badge is None else f'<span class="badge {_class(section.badge)}">{_text(section.badge)}</span> '
    )
    counted = "" if number is None else f'<span class="number">{number}</span> '
    title = f"<h{level}>{counted}{badge}{_text(section.title, MOST_WORDS_LETTERS)}</h{level}>"
    body = "".join(
        _section(block, min(level + 1, _DEEPEST), charts) if isinstance(block, Section) else _block(block, charts)
        for block in section.blocks
    )
    kind = ' class="card"' if section.badge else ""
    return f'<section id="{escape(section.key)}"{kind}>\n{title}\n{body}</section>\n'


def _class(badge: str) -> str:
    """A badge has a colour of its own only where the style knows it."""
    return badge if badge in {"must", "should", "could", "note"} else "note"


def _block(block: Block, charts: dict[int, int]) -> str:
    match block:
        case Paragraph():
            return f"<p>{_words(block.words)}</p>\n"
        case Missing():
            return _missing(block)
        case Bullets():
            return f"<ul>{''.join(f'<li>{_words(item)}</li>' for item in block.items)}</ul>\n"
        case Pairs():
            pairs = "".join(f"<dt>{_text(name)}</dt><dd>{_words(words)}</dd>" for name, words in block.pairs)
            return f"<dl>{pairs}</dl>\n"
        case Table():
            return _table(block)
        case Chart():
            return _chart(block, charts[id(block)])
        case Section():
            return _section(block, _DEEPEST, charts)


def _missing(block: Missing) -> str:
    commands = "".join(f"<li>{_code(command)}</li>" for command in block.commands)
    would = f" This would:</p><ol>{commands}</ol>" if commands else "</p>"
    what = _text(block.what, MOST_WORDS_LETTERS)
    return f'<div class="missing"><p>{what}: <strong>{block.state}.</strong>{would}</div>\n'


def _chart(chart: Chart, number: int) -> str:
    description = shown(chart.description, MOST_WORDS_LETTERS)
    svg = drawn(chart.drawing, key=f"chart-{number}", title=shown(chart.title), description=description)
    label = f'role="group" tabindex="0" aria-label="Chart: {_text(chart.title)}"'
    figure = f'<figure><figcaption>{_text(chart.title)}</figcaption><div class="box" {label}>{svg}</div></figure>\n'
    return figure + _table(chart.table)


def _table(table: Table) -> str:
    sides = table.align.ljust(len(table.headers), "l")
    classes = [' class="r"' if side == "r" else "" for side in sides]
    heads = "".join(
        f'<th scope="col"{kind}>{_text(header)}</th>' for header, kind in zip(table.headers, classes, strict=False)
    )
    rows = "".join(
        f"<tr>{''.join(_cell(cell, side) for cell, side in zip(row, sides, strict=False))}</tr>\n" for row in table.rows
    )
    kind, name = ("box long" if table.long else "box"), _text(table.caption)
    return (
        f'<div class="{kind}" role="group" tabindex="0" aria-label="Table: {name}"><table><caption>{name}</caption>'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )


def _cell(cell: str | None, side: str) -> str:
    """One whose words are too long for a column may be broken anywhere; the others only between words."""
    text = shown(cell)
    kind = "r" if side == "r" else "t" if len(text) > _SHORT_LETTERS else ""
    if max(map(len, text.split()), default=0) > _LONG_WORD_LETTERS:
        kind = "w"
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _words(words: Words) -> str:
    return rendered(words, _sentences, code=_code, strong=lambda text: f"<strong>{_sentences(text)}</strong>")


def _code(text: str) -> str:
    return f"<code>{_sentences(text)}</code>"


def _sentences(text: str) -> str:
    return _text(text, MOST_WORDS_LETTERS)


def _text(text: str | None, most: int = MOST_CELL_LETTERS) -> str:
    return escape(shown(text, most))
