import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.tables import (
    escape_markdown,
    markdown_table,
    printable_line,
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
        "a|b",
        "<img src=x onerror=alert(1)>",
        "`code`",
        "&lt;",
        "[x](javascript:alert(1))",
        "https://evil",
        "www.evil",
        "a@b.c",
        "\\",
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
