"""Subjects are compared in a unit that all count."""

import pytest

from autotune.baseline.decide.common_unit import common_unit
from autotune.errors import BadInput


@pytest.mark.parametrize(
    ("rates", "unit"),
    [
        ({"a": {"tokens": 1.0, "samples": 2.0}, "b": {"samples": 1.0}}, "samples"),
        ({"a": {"samples": 2.0, "tokens": 1.0}, "b": {"tokens": 1.0}}, "tokens"),
        ({"a": {"samples": 2.0, "tokens": 1.0}}, "tokens"),
    ],
)
def test_finds_the_unit_of_all(rates, unit):
    assert common_unit(rates) == unit


def test_says_what_each_counts():
    with pytest.raises(BadInput, match="a counts tokens; b counts images and samples"):
        common_unit({"a": {"tokens": 1.0}, "b": {"samples": 1.0, "images": 2.0}})
