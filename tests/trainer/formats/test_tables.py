"""Strict tables: reading of files, and validation."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from trainer.formats.errors import BadConfig
from trainer.formats.tables import StrictTable, parse_table, read_json, read_toml


class Inner(StrictTable):
    learning_rate: float = 1.0


class Outer(StrictTable):
    inner: Inner = Inner()
    others: list[Inner] = Field(default_factory=list)
    batch_size: Annotated[int, Field(gt=0)] = 1


@pytest.mark.parametrize(
    ("value", "message", "next_step"),
    [
        pytest.param(
            {"inner": {"learning_rat": 1.0}},
            "inner.learning_rat",
            "'learning_rate'",
            id="misspelt in a table",
        ),
        pytest.param(
            {"others": [{"learning_ratee": 1.0}]},
            "learning_ratee",
            "'learning_rate'",
            id="misspelt in a list",
        ),
        pytest.param(
            {"zzz": 1}, "zzz", "closest of 3 known keys", id="like no known key"
        ),
        pytest.param(
            {"batch_size": -3},
            "batch_size = -3",
            "Correct 'batch_size'",
            id="outside its range",
        ),
        # Nothing is converted silently.
        pytest.param(
            {"batch_size": "3"},
            "batch_size = '3'",
            "Correct 'batch_size'",
            id="other type",
        ),
    ],
)
def test_names_wrong_key_with_next_step(value, message, next_step):
    with pytest.raises(BadConfig) as raised:
        parse_table(Outer, value, where="p.toml")
    assert message in raised.value.message
    assert next_step in raised.value.next_step


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        pytest.param(
            read_toml, b"a = 1\n" * 200_000, "limit of 1,048,576 bytes", id="too large"
        ),
        pytest.param(
            read_json, b"[" * 40 + b"]" * 40, "32 nested levels", id="too deep"
        ),
        pytest.param(
            read_json,
            b"[" * 100_000 + b"]" * 100_000,
            "not valid JSON",
            id="too deep for the parser",
        ),
        # Python's parser may fail before levels are counted.
        pytest.param(
            read_toml,
            b"x" + b".x" * 5000 + b" = 1\n",
            "nested levels|not valid TOML",
            id="too deep by a dotted key",
        ),
        pytest.param(read_json, b"{", "not valid JSON", id="no JSON"),
        pytest.param(read_toml, b"x =", "not valid TOML", id="no TOML"),
        pytest.param(read_toml, b"\xff\xfe\x00", "not UTF-8", id="no text"),
    ],
)
def test_rejects_invalid_file(tmp_path, read, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadConfig, match=message):
        read(tmp_path / "f")


@pytest.fixture
def existing_file(tmp_path) -> Path:
    path = tmp_path / "bert-mini-cpu.toml"
    path.touch()
    return path


def test_suggests_file_with_similar_name(existing_file):
    misspelt = existing_file.with_name("bert-mini-cpy.toml")
    with pytest.raises(BadConfig) as raised:
        read_toml(misspelt, if_missing="Write one.")
    assert raised.value.next_step == f"Did you mean {existing_file}?"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("other.toml", id="unlike any"),
        pytest.param("mini.toml", id="similar by its suffix only"),
        pytest.param("none/bert-mini-cpu.toml", id="other directory"),
    ],
)
def test_suggests_no_file_without_similar_name(existing_file, name):
    with pytest.raises(BadConfig) as raised:
        read_toml(existing_file.parent / name, if_missing="Write one.")
    assert raised.value.next_step == "Write one."
