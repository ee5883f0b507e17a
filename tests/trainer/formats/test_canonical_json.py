import datetime
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.formats.canonical_json import canonical_json, canonical_sha256


def test_form_has_sorted_keys_and_no_spaces():
    value = {"b": [1, 2.5, None, True], "a": {"ä": "x y"}}
    assert canonical_json(value) == '{"a":{"ä":"x y"},"b":[1,2.5,null,true]}'.encode()


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_order_of_keys_does_not_matter(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


def test_hash_is_the_sha256_of_the_form():
    # From the command: printf '{"a":1}' | sha256sum
    assert (
        canonical_sha256({"a": 1})
        == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    )


@pytest.mark.parametrize(
    ("value", "error_type"),
    [
        pytest.param(math.nan, ValueError, id="NaN"),
        pytest.param(math.inf, ValueError, id="infinity"),
        pytest.param("\ud800", ValueError, id="half a surrogate pair"),
        pytest.param(datetime.date(2026, 1, 1), TypeError, id="date"),
    ],
)
def test_rejects_value_without_canonical_form(value, error_type):
    with pytest.raises(error_type):
        canonical_json({"key": value})
