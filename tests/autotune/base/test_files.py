"""Files that appear whole or not at all, and JSON that people can read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.files import check_writable, write_atomically
from autotune.base.readable_json import readable_json
from autotune.errors import BadInput


def test_check_leaves_no_files(tmp_path):
    check_writable(tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


def test_replaces_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "deep" / "p.toml"
    write_atomically(path, "old")
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(check_writable, id="check"),
        pytest.param(lambda path: write_atomically(path, ""), id="write"),
    ],
)
def test_path_that_cannot_be_written_is_bad_input(write, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    below_a_file = file / "x"
    with pytest.raises(BadInput, match="cannot write"):
        write(below_a_file)


_JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=_JSON_VALUES)
def test_readable_json_is_the_same_value(value):
    assert json.loads(readable_json(value)) == value


def test_each_row_of_long_table_has_a_line():
    rows = [{"name": f"row {number}", "figures": [number] * 100} for number in range(4)]
    lines = readable_json({"bars": [], "rows": rows}).splitlines()
    row_lines = [line for line in lines if '"name"' in line]
    other_lines = [line.strip() for line in lines if line not in row_lines]
    assert [json.loads(line.rstrip(",")) for line in row_lines] == rows
    assert other_lines == ["{", '"bars": [],', '"rows": [', "]", "}"]
