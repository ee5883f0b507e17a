from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from trainer.errors import BadConfig
from trainer.schema import Table, canonical_json, parse_table, read_json, read_toml


class Inner(Table):
    learning_rate: float = 1.0


class Outer(Table):
    inner: Inner = Inner()
    others: list[Inner] = Field(default_factory=list)
    rows: Annotated[int, Field(gt=0)] = 1


def test_a_misspelt_key_is_named_with_the_nearest_valid_one():
    with pytest.raises(BadConfig) as caught:
        parse_table(Outer, {"inner": {"learning_rat": 1.0}}, where="p.toml")
    assert "inner.learning_rat" in caught.value.message
    assert "'learning_rate'" in caught.value.next_step


def test_a_misspelt_key_inside_a_list_of_tables_is_suggested_too():
    with pytest.raises(BadConfig) as caught:
        parse_table(Outer, {"others": [{"learning_ratee": 1.0}]}, where="p.toml")
    assert "'learning_rate'" in caught.value.next_step


def test_a_key_like_no_other_lists_the_known_ones():
    with pytest.raises(BadConfig) as caught:
        parse_table(Outer, {"zzz": 1}, where="p.toml")
    assert "inner, others, rows" in caught.value.next_step


def test_a_wrong_value_is_shown():
    with pytest.raises(BadConfig, match="rows = -3"):
        parse_table(Outer, {"rows": -3}, where="p.toml")


def test_nothing_is_converted_silently():
    with pytest.raises(BadConfig):
        parse_table(Outer, {"rows": "3"}, where="p.toml")


def test_a_file_that_is_too_large_is_not_parsed(tmp_path):
    path = tmp_path / "large.toml"
    path.write_text("a = 1\n" * 1000)
    with pytest.raises(BadConfig, match="larger than 100 bytes"):
        read_toml(path, max_bytes=100)


@pytest.mark.parametrize("depth", [40, 100_000])
def test_a_file_that_is_nested_too_deep_is_refused(tmp_path, depth):
    path = tmp_path / "deep.json"
    path.write_text("[" * depth + "]" * depth)
    with pytest.raises(BadConfig):
        read_json(path)


def test_deeply_dotted_toml_is_refused(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text("x" + ".x" * 5000 + " = 1\n")
    with pytest.raises(BadConfig):
        read_toml(path)


def test_what_is_not_text_is_refused(tmp_path):
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadConfig, match="UTF-8"):
        read_toml(path)


def test_a_file_that_is_missing_is_asked_for_by_the_name_that_is_close(tmp_path):
    (tmp_path / "bert-mini-cpu.toml").touch()
    with pytest.raises(BadConfig) as refused:
        read_toml(tmp_path / "bert-mini-cpy.toml", if_missing="Write one.")
    assert refused.value.next_step == f"Did you mean {tmp_path / 'bert-mini-cpu.toml'}?"


@pytest.mark.parametrize("name", ["other.toml", "none/bert-mini-cpu.toml"])
def test_where_no_name_is_close_the_next_step_is_what_the_caller_knows(tmp_path, name):
    (tmp_path / "bert-mini-cpu.toml").touch()
    with pytest.raises(BadConfig) as refused:
        read_toml(tmp_path / name, if_missing="Write one.")
    assert refused.value.next_step == "Write one."


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values))
def test_canonical_json_does_not_depend_on_the_order_of_keys(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))
