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


@pytest.mark.parametrize(
    ("value", "message", "next_step"),
    [
        ({"inner": {"learning_rat": 1.0}}, "inner.learning_rat", "'learning_rate'"),
        ({"others": [{"learning_ratee": 1.0}]}, "learning_ratee", "'learning_rate'"),
        ({"zzz": 1}, "zzz", "inner, others, rows"),
        ({"rows": -3}, "rows = -3", "Correct 'rows'"),
        ({"rows": "3"}, "rows = '3'", "Correct 'rows'"),  # nothing is converted silently
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_to_do(value, message, next_step):
    with pytest.raises(BadConfig) as caught:
        parse_table(Outer, value, where="p.toml")
    assert message in caught.value.message
    assert next_step in caught.value.next_step


@pytest.mark.parametrize(
    ("read", "content", "why"),
    [
        (read_toml, b"a = 1\n" * 200_000, "larger than 1048576 bytes"),
        (read_json, b"[" * 40 + b"]" * 40, "nested deeper than 32"),
        (read_json, b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (read_json, b"{", "not valid JSON"),
        (read_toml, b"x" + b".x" * 5000 + b" = 1\n", "nested deeper|not valid TOML"),
        (read_toml, b"x =", "not valid TOML"),
        (read_toml, b"\xff\xfe\x00", "not UTF-8"),
    ],
    ids=["large", "deep", "deepest", "no JSON", "dotted", "no TOML", "no text"],
)
def test_a_file_that_is_no_such_file_is_refused(tmp_path, read, content, why):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadConfig, match=why):
        read(tmp_path / "f")


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        ("bert-mini-cpy.toml", "Did you mean {}/bert-mini-cpu.toml?"),
        ("other.toml", "Write one."),
        ("none/bert-mini-cpu.toml", "Write one."),
    ],
)
def test_a_file_that_is_missing_is_asked_for_by_a_name_that_is_close_or_as_the_caller_knows(tmp_path, name, next_step):
    (tmp_path / "bert-mini-cpu.toml").touch()
    with pytest.raises(BadConfig) as refused:
        read_toml(tmp_path / name, if_missing="Write one.")
    assert refused.value.next_step == next_step.format(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values))
def test_canonical_json_does_not_depend_on_the_order_of_keys(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))
