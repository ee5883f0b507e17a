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


@pytest.mark.parametrize(
    ("headers", "rows", "align", "text"),
    [
        (
            ("name", "bytes"),
            [("a", "1"), ("long name", "12345")],
            "lr",
            "name       bytes\na              1\nlong name  12345",
        ),
        (("x",), [(None,)], "", "x\nn/a"),
        (("a", "b"), [], "", "a  b"),
        (("n", "v"), [("日本", "x"), ("abcd", "y")], "", "n     v\n日本  x\nabcd  y"),
    ],
    ids=["aligned", "missing", "no rows", "wide"],
)
def test_aligns_columns(headers, rows, align, text):
    assert text_table(headers, rows, align) == text


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


# Headers, rows and alignment of a table that is 61 columns wide.
WIDE = (
    ("model", "tokens/s", "what limits it"),
    [
        ["bert-mini", "8,323", "memory bandwidth of the embedding table"],
        ["bert-small", "1,204", None],
    ],
    "lrl",
)


def test_wide_table_breaks_cells_between_words():
    assert text_table(*WIDE, max_columns=40).splitlines() == [
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
    assert text_table(*WIDE, max_columns=columns) == text_table(*WIDE)


def test_table_of_long_words_becomes_pairs():
    headers, rows, align = WIDE
    rows = [*rows, ["modernbert", "1", ""]]
    assert text_table(headers, rows, align, max_columns=24).splitlines() == [
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
    wide = text_table(("a", "b", "c"), rows)
    fitted = text_table(("a", "b", "c"), rows, max_columns=columns)
    always = text_table(("a", "b", "c"), rows, max_columns=columns, always_columns=True)
    assert sorted(always.split()) == sorted(wide.split())
    words = [
        word for row in rows for cell in row for word in printable_line(cell).split()
    ]
    assert set(words) <= set(fitted.split())


def test_terminal_limits_tables_on_standard_output_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert terminal_table(*WIDE) == text_table(*WIDE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal_table(*WIDE) == text_table(*WIDE, max_columns=40)


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
