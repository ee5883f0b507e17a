"""Tables as text: aligned, within the terminal, and free of markup."""

import html
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base import render_console
from autotune.base.document import Section, facts_table
from autotune.base.render_console import console_text
from autotune.base.tables import (
    escape_markdown,
    markdown_table,
    printable_line,
    terminal_table,
    text_table,
)


def test_aligns_columns():
    rows = [("a", "1"), ("long name", "12345")]
    assert text_table(("name", "bytes"), rows, align="lr").splitlines() == [
        "name       bytes",
        "a              1",
        "long name  12345",
    ]


def test_aligns_wide_characters():
    # A Chinese character takes two columns of a terminal.
    rows = [("日本", "x"), ("abcd", "y")]
    assert text_table(("n", "v"), rows).splitlines() == [
        "n     v",
        "日本  x",
        "abcd  y",
    ]


def test_shows_missing_cell_as_na():
    assert text_table(("x",), [(None,)]) == "x\nn/a"


def test_table_without_rows_has_headers():
    assert text_table(("a", "b"), []) == "a  b"


def test_aligns_markdown_columns():
    table = markdown_table(("a", "b"), [("x", "1")], "lr")
    assert table == "| a | b |\n| --- | ---: |\n| x | 1 |"


@pytest.mark.parametrize(
    "render",
    [
        pytest.param(text_table, id="text"),
        pytest.param(markdown_table, id="markdown"),
    ],
)
def test_rejects_row_of_another_length(render):
    with pytest.raises(ValueError, match="1 cells under 2 headers"):
        render(("a", "b"), [("x",)])


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param("a|b", id="column"),
        pytest.param("<img src=x onerror=alert(1)>", id="HTML"),
        pytest.param("`code`", id="code"),
        pytest.param("&lt;", id="entity"),
        pytest.param("[x](javascript:alert(1))", id="link"),
        pytest.param("https://evil", id="bare address"),
        pytest.param("www.evil", id="bare address without a scheme"),
        pytest.param("a@b.c", id="e-mail address"),
        pytest.param("\\", id="escape"),
    ],
)
def test_escapes_markup_in_cell(hostile):
    escaped = escape_markdown(hostile)
    assert html.unescape(escaped) == hostile
    assert not re.search(r"[|<>`@\\]|\]\(|://|www\.", escaped)


def test_leaves_readable_text_as_it_is():
    readable = "micro_batch_size [1.2, 1.3] (n = 5)"
    assert escape_markdown(readable) == readable


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_hostile_cells_add_no_lines_or_columns(rows):
    lines = markdown_table(("a", "b"), rows).split("\n")
    assert len(lines) == len(rows) + 2
    assert all(line.count("|") == 3 for line in lines)
    assert len(text_table(("a", "b"), rows).split("\n")) == len(rows) + 1


@given(st.text())
def test_any_text_becomes_one_printable_line(text):
    assert printable_line(text).isprintable()


def test_writes_terminal_escapes_out():
    assert printable_line("\x1b[31mred\udc80") == "\\x1b[31mred\\udc80"


WIDE = {
    "headers": ("model", "tokens/s", "what limits it"),
    "rows": [
        ["bert-mini", "8,323", "memory bandwidth of the embedding table"],
        ["bert-small", "1,204", None],
    ],
    "align": "lrl",
}
"""Arguments of a table that is 61 columns wide."""


def test_wide_table_breaks_cells_between_words():
    assert text_table(**WIDE, max_columns=40).splitlines() == [
        "model       tokens/s  what limits it",
        "bert-mini      8,323  memory bandwidth",
        "                      of the embedding",
        "                      table",
        "bert-small     1,204  n/a",
    ]


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(None, id="no limit"),
        pytest.param(200, id="wider than the table"),
        pytest.param(61, id="as wide as the table"),
    ],
)
def test_table_that_fits_is_not_broken(columns):
    assert text_table(**WIDE, max_columns=columns) == text_table(**WIDE)


def test_table_of_long_words_becomes_pairs():
    with_empty_cell = WIDE | {"rows": [*WIDE["rows"], ["modernbert", "1", ""]]}
    assert text_table(**with_empty_cell, max_columns=24).splitlines() == [
        "model: bert-mini",
        "tokens/s: 8,323",
        "what limits it: memory bandwidth of the embedding table",
        "",
        "model: bert-small",
        "tokens/s: 1,204",
        "what limits it: n/a",
        "",
        "model: modernbert",
        "tokens/s: 1",
    ]


@given(
    rows=st.lists(st.lists(st.text(), min_size=3, max_size=3), max_size=5),
    columns=st.integers(1, 120),
)
def test_no_word_is_broken_or_lost(rows, columns):
    headers = ("a", "b", "c")
    unlimited = text_table(headers, rows)
    in_columns = text_table(headers, rows, max_columns=columns, always_columns=True)
    assert sorted(in_columns.split()) == sorted(unlimited.split())
    fitted = text_table(headers, rows, max_columns=columns)
    words = [
        word for row in rows for cell in row for word in printable_line(cell).split()
    ]
    # If it does not fit as columns, it becomes pairs of a header and a cell.
    assert set(words) <= set(fitted.split())


def test_terminal_limits_its_tables(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal_table(**WIDE) == text_table(**WIDE, max_columns=40)


def test_pipe_does_not_limit_its_tables(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal_table(**WIDE) == text_table(**WIDE)


def test_facts_keep_their_names_apart(monkeypatch):
    monkeypatch.setattr(render_console, "terminal_columns", lambda: 30)
    table = facts_table("Facts", [("name", "some more words here"), ("path", "x" * 40)])
    section = Section(key="s", title="Section", blocks=(table,))
    assert console_text((section,)).splitlines() == [
        "Section",
        "  Facts",
        "  name  some more words here",
        f"  path  {'x' * 40}",
    ]
