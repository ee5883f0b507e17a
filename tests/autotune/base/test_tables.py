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
def test_columns_line_up(headers, rows, align, text):
    assert text_table(headers, rows, align) == text


def test_markdown_aligns_numbers_to_the_right_and_a_row_of_another_length_is_refused():
    assert (
        markdown_table(("a", "b"), [("x", "1")], "lr")
        == "| a | b |\n| --- | ---: |\n| x | 1 |"
    )
    for table in (text_table, markdown_table):
        with pytest.raises(ValueError, match="1 cells under 2 headers"):
            table(("a", "b"), [("x",)])


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
def test_markup_in_a_cell_is_shown_and_not_obeyed(hostile):
    shown = escape_markdown(hostile)
    assert html.unescape(shown) == hostile
    assert not re.search(r"[|<>`@\\]|\]\(|://|www\.", shown)
    assert (
        escape_markdown(readable := "micro_batch_size [1.2, 1.3] (n = 5)") == readable
    )


@given(st.lists(st.tuples(st.text(), st.text()), max_size=5))
def test_hostile_cells_never_add_rows_or_columns(rows):
    lines = markdown_table(("a", "b"), rows).split("\n")
    assert len(lines) == len(rows) + 2
    assert all(line.count("|") == 3 for line in lines)
    assert len(text_table(("a", "b"), rows).split("\n")) == len(rows) + 1


@given(st.text())
def test_inert_text_is_one_printable_line_with_terminal_escapes_written_out(text):
    assert printable_line(text).isprintable()
    assert printable_line("\x1b[31mred\udc80") == "\\x1b[31mred\\udc80"
