import math

import pytest

from trainer.formats.errors import BadConfig
from trainer.formats.nested_tables import flatten_table, reject_infinite


def test_flattens_inner_tables_to_dotted_keys():
    table = {"seed": 1, "data": {"path": "d", "columns": ["text"], "options": {}}}
    assert flatten_table(table, "train.") == {
        "train.seed": 1,
        "train.data.path": "d",
        "train.data.columns": ["text"],
        "train.data.options": {},
    }


def test_whole_tables_stay_one_value():
    table = {"model": {"name": "m", "config": {"hidden_size": 64}}}
    assert flatten_table(table, whole="config") == {
        "model.name": "m",
        "model.config": {"hidden_size": 64},
    }


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(math.inf, "p.toml", id="a number"),
        pytest.param({"a": {"b": -math.inf}}, "p.toml: a.b", id="in a table"),
        pytest.param({"a": [0.0, math.nan]}, "p.toml: a.1", id="in a list"),
    ],
)
def test_rejects_number_that_is_not_finite(value, name):
    with pytest.raises(BadConfig, match=f"^{name} = .*must be finite"):
        reject_infinite(value, "p.toml")


def test_accepts_finite_numbers():
    reject_infinite({"a": [0.0, 1], "b": "inf", "c": None}, "p.toml")
