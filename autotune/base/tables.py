"""Tables as text.

Names in them may come from untrusted files, so every cell loses its control characters
first.
"""

import re
import unicodedata
from collections.abc import Sequence

from trainer.errors import printable

Row = Sequence[str | None]
"""Cells of a row, one per column; a missing one shows as n/a."""

# Characters that could start a column, code, HTML, a link's target, or a bare link
# (address, www., e-mail).
_MARKUP = re.compile(r"[\\|`<>&@]|(?<=\])\(|:(?=//)|(?<=www)\.", re.IGNORECASE)


def printable_line(text: str | None) -> str:
    """Return one line with control characters written out; ``n/a`` if it is missing.

    No name can control a terminal then.
    """
    return "n/a" if text is None else printable(" ".join(text.splitlines()))


def escape_markdown(text: str | None) -> str:
    """Return one line that Markdown shows verbatim.

    Markup becomes entities, as renderers differ in how they read backslashes.
    """
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", printable_line(text))


def text_table(headers: Sequence[str], rows: Sequence[Row], align: str = "") -> str:
    """Return columns aligned for a terminal, without a final newline.

    Args:
        headers: Header of each column.
        rows: Cells of each row.
        align: One letter per column, ``l`` (left) or ``r`` (right); further columns are
            left-aligned.

    Raises:
        ValueError: If a row has another number of cells than there are headers.
    """
    lines = _printable_cells(headers, rows)
    widths = [
        max(_display_width(line[column]) for line in lines)
        for column in range(len(headers))
    ]
    sides = align.ljust(len(headers), "l")
    padded_lines = []
    for line in lines:
        cells = [
            _pad(text, width, side)
            for text, width, side in zip(line, widths, sides, strict=False)
        ]
        padded_lines.append("  ".join(cells).rstrip())
    return "\n".join(padded_lines)


def markdown_table(headers: Sequence[str], rows: Sequence[Row], align: str = "") -> str:
    """Return a GitHub-flavoured table whose cells cannot start markup.

    Raises:
        ValueError: As ``text_table`` does.
    """
    sides = align.ljust(len(headers), "l")[: len(headers)]
    head, *body = [
        [escape_markdown(cell) for cell in line]
        for line in _printable_cells(headers, rows)
    ]
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def _printable_cells(headers: Sequence[str], rows: Sequence[Row]) -> list[list[str]]:
    """Return the headers and the rows with printable cells."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(
                f"a row of {len(row)} cells under {len(headers)} headers: {list(row)!r}"
            )
    return [[printable_line(cell) for cell in line] for line in (headers, *rows)]


def _display_width(text: str) -> int:
    """Return a text's width in columns of a terminal."""
    return sum(map(_character_width, text))


def _character_width(character: str) -> int:
    """Return 2 for wide East Asian characters, 0 for combining ones, else 1."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _pad(text: str, width: int, side: str) -> str:
    space = " " * (width - _display_width(text))
    return space + text if side == "r" else text + space
