"""Tables as text.

Names in them may come from untrusted files, so every cell is made inert first.
"""

import re
import unicodedata
from collections.abc import Sequence

from trainer.errors import printable

Row = Sequence[str | None]
"""Cells of a row, one per column; a missing one shows as n/a."""

# Characters that could start a column, code, HTML, a link's target, or a bare link
# (address, www., e-mail).
_ACTIVE = re.compile(r"[\\|`<>&@]|(?<=\])\(|:(?=//)|(?<=www)\.", re.IGNORECASE)


def printable_line(text: str | None) -> str:
    """Return one line with control characters written out, so that no name can control a terminal."""
    return "n/a" if text is None else printable(" ".join(text.splitlines()))


def escape_markdown(text: str | None) -> str:
    """Return one line that Markdown shows verbatim: with entities, as renderers read backslashes differently."""
    return _ACTIVE.sub(lambda match: f"&#{ord(match[0])};", printable_line(text))


def text_table(headers: Sequence[str], rows: Sequence[Row], align: str = "") -> str:
    """Return columns aligned for a terminal, without a final newline.

    ``align`` has one letter per column, ``l`` (left) or ``r`` (right); further columns
    are left-aligned. Raise ``ValueError`` if a row has another number of cells than
    there are headers.
    """
    lines = _lines(headers, rows)
    widths = [
        max(_width(line[column]) for line in lines) for column in range(len(headers))
    ]
    sides = align.ljust(len(headers), "l")
    padded = (
        [_pad(*cell) for cell in zip(line, widths, sides, strict=False)]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in padded)


def markdown_table(headers: Sequence[str], rows: Sequence[Row], align: str = "") -> str:
    """Return a GitHub-flavoured table whose cells cannot start markup.

    Raises:
        ValueError: As ``text_table`` does.
    """
    sides = align.ljust(len(headers), "l")
    head, *body = [
        [escape_markdown(cell) for cell in line] for line in _lines(headers, rows)
    ]
    rule = ["---:" if side == "r" else "---" for side in sides[: len(headers)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def _lines(headers: Sequence[str], rows: Sequence[Row]) -> list[list[str]]:
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(
                f"a row of {len(row)} cells under {len(headers)} headers: {list(row)!r}"
            )
    return [[printable_line(cell) for cell in line] for line in (headers, *rows)]


def _width(text: str) -> int:
    """Return a text's width in terminal columns.

    East Asian wide characters take two, combining ones none.
    """
    return sum(
        (
            0
            if unicodedata.combining(c)
            else 2
            if unicodedata.east_asian_width(c) in "WF"
            else 1
        )
        for c in text
    )


def _pad(text: str, width: int, side: str) -> str:
    space = " " * (width - _width(text))
    return space + text if side == "r" else text + space
