"""Tables as text, for a terminal and as Markdown.

Names in tables may come from untrusted files, so that control characters are written
out in all cells.
"""

import itertools
import re
import shutil
import sys
import unicodedata
from collections.abc import Sequence

from trainer.formats.errors import printable

Row = Sequence[str | None]
"""Cells of a row, one per column; a missing one shows as n/a."""

_GAP = "  "
"""Space between two columns."""

_MARKUP = re.compile(
    r"""
      [\\|`<>&@]      # an escape, a column, code, HTML, an e-mail address
    | (?<=\])\(       # the target of a link: ](
    | :(?=//)         # a bare link: https://
    | (?<=www)\.      # a bare link: www.
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Characters that could start markup in Markdown."""


def printable_line(text: str | None) -> str:
    """Return the text as one line that cannot control a terminal; ``n/a`` for None.

    Control characters are written out.
    """
    return "n/a" if text is None else printable(" ".join(text.splitlines()))


def escape_markdown(text: str | None) -> str:
    """Return the text as one line that Markdown shows verbatim; ``n/a`` for None.

    Characters of markup become entities, as renderers differ in how they read
    backslashes.
    """
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", printable_line(text))


def terminal_columns() -> int | None:
    """Return the width of the terminal on standard output; None without one."""
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def terminal_table(headers: Sequence[str], rows: Sequence[Row], align: str = "") -> str:
    """Return a ``text_table`` that fits the terminal on standard output, if any."""
    return text_table(headers, rows, align, max_columns=terminal_columns())


def text_table(
    headers: Sequence[str],
    rows: Sequence[Row],
    align: str = "",
    *,
    max_columns: int | None = None,
    always_columns: bool = False,
) -> str:
    """Return columns aligned for a terminal, without a final newline.

    Cells are broken between words if the table is too wide. If single words make it too
    wide, each row becomes several lines, one for each header with its cell.

    Args:
        headers: Header of each column.
        rows: Cells of each row.
        align: One letter per column, ``l`` (left) or ``r`` (right); further columns are
            left-aligned.
        max_columns: Width to fit; None does not limit it.
        always_columns: True if the table keeps its columns however wide its words are.

    Raises:
        ValueError: If a row has another number of cells than there are headers.
    """
    lines = _printable_cells(headers, rows)
    columns = list(zip(*lines, strict=True))
    widths = [max(map(_display_width, column)) for column in columns]
    if max_columns is not None:
        least_widths = [max(map(_longest_word_width, column)) for column in columns]
        room = max_columns - len(_GAP) * (len(headers) - 1)
        if sum(least_widths) > room and not always_columns:
            return _pairs(lines)
        widths = _fit(widths, least_widths, room)
    sides = column_sides(align, len(headers))
    padded_lines: list[str] = []
    for line in lines:
        padded_lines += _padded_lines(line, widths, sides)
    return "\n".join(padded_lines)


def column_sides(align: str, column_count: int) -> str:
    """Return the alignment of each column; ``align`` may be shorter or longer."""
    return align.ljust(column_count, "l")[:column_count]


def _padded_lines(
    cells: Sequence[str], widths: Sequence[int], sides: Sequence[str]
) -> list[str]:
    """Return the lines of a row: several if one of its cells has to be broken."""
    wrapped_cells = [
        _wrap(text, width) for text, width in zip(cells, widths, strict=True)
    ]
    padded_lines = []
    for parts in itertools.zip_longest(*wrapped_cells, fillvalue=""):
        padded_parts = [
            _pad(text, width, side)
            for text, width, side in zip(parts, widths, sides, strict=True)
        ]
        padded_lines.append(_GAP.join(padded_parts).rstrip())
    return padded_lines


def _fit(widths: Sequence[int], least_widths: Sequence[int], room: int) -> list[int]:
    """Return widths of columns that together fit into ``room``, if they can.

    No column becomes narrower than its least width. The widest column is narrowed
    first, so that figures stay on one line.
    """
    fitting_widths = list(widths)
    while sum(fitting_widths) > room:
        shrinkable = [
            column
            for column, width in enumerate(fitting_widths)
            if width > least_widths[column]
        ]
        if not shrinkable:
            break
        widest = max(shrinkable, key=lambda column: fitting_widths[column])
        fitting_widths[widest] -= 1
    return fitting_widths


def _longest_word_width(text: str) -> int:
    """Return the width of the longest word in columns of a terminal."""
    return max(map(_display_width, text.split()), default=0)


def _wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text that is broken between words, unless it fits.

    A word that is longer than ``width`` is not broken.
    """
    if _display_width(text) <= width:
        return [text]
    parts = [""]
    for word in text.split():
        # The first word gets a blank in front, which is dropped.
        longer = f"{parts[-1]} {word}".lstrip()
        if _display_width(longer) <= width:
            parts[-1] = longer
        else:
            parts.append(word)
    return [part for part in parts if part]


def _pairs(lines: Sequence[Sequence[str]]) -> str:
    """Return a line ``header: cell`` for each cell with text; rows are set apart.

    Args:
        lines: The headers, and after them the rows.
    """
    headers, *rows = lines
    groups = []
    for row in rows:
        pairs = zip(headers, row, strict=True)
        groups.append("\n".join(f"{header}: {cell}" for header, cell in pairs if cell))
    return "\n\n".join(groups)


def markdown_table(headers: Sequence[str], rows: Sequence[Row], align: str = "") -> str:
    """Return a GitHub-flavoured table whose cells cannot start markup.

    Raises:
        ValueError: If a row has another number of cells than there are headers.
    """
    sides = column_sides(align, len(headers))
    head, *body = [
        [escape_markdown(cell) for cell in line]
        for line in _printable_cells(headers, rows)
    ]
    delimiters = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, delimiters, *body))


def _printable_cells(headers: Sequence[str], rows: Sequence[Row]) -> list[list[str]]:
    """Return the headers, and after them the rows, with printable cells.

    Raises:
        ValueError: If a row has another number of cells than there are headers.
    """
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
    """Return a text padded to a width; ``side`` ``r`` aligns it to the right."""
    space = " " * (width - _display_width(text))
    return space + text if side == "r" else text + space
