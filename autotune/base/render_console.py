"""Documents as text for a terminal."""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from autotune.base import document as doc
from autotune.base.document import render_words
from autotune.base.tables import printable_line, terminal_columns, text_table

_INDENT = "  "


def console_text(blocks: Sequence[doc.Block]) -> str:
    """Return a command's output for a terminal.

    Charts become their tables. Tables fit the terminal on standard output, if any.
    """
    return _console_blocks(blocks, terminal_columns())


def _console_blocks(blocks: Sequence[doc.Block], max_columns: int | None) -> str:
    """Return blocks as text; an empty line sets tables and sections apart.

    Args:
        blocks: The blocks.
        max_columns: Width of tables; None does not limit it.
    """
    parts = []
    for is_set_apart, group in itertools.groupby(blocks, _is_set_apart):
        gap = "\n\n" if is_set_apart else "\n"
        parts.append(gap.join(_console_block(block, max_columns) for block in group))
    return "\n\n".join(parts)


def _is_set_apart(block: doc.Block) -> bool:
    return isinstance(block, doc.Table | doc.Chart | doc.Section)


def _console_block(block: doc.Block, max_columns: int | None) -> str:
    """Return one block as text; arguments are as for ``_console_blocks``."""
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
    """Return a table under its caption, if it has one; facts have no headers."""
    is_facts = table.headers == doc.FACTS
    text = text_table(
        table.headers,
        table.rows,
        table.align,
        max_columns=max_columns,
        # A line for each header with its cell would repeat the headers of facts.
        always_columns=is_facts,
    )
    if is_facts:
        _, _, text = text.partition("\n")
    else:
        text = text.rstrip("\n")
    return f"{printable_line(table.caption)}\n{text}" if table.caption else text


def _console_words(words: doc.Words) -> str:
    return render_words(
        words,
        render_plain=printable_line,
        render_code=printable_line,
        render_strong=printable_line,
    )
