"""Encoding of configurations, and how alike they are."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.sampler.decide.discrete_space import space_of, values_in

VALUES = st.dictionaries(
    st.sampled_from("abcd"),
    st.one_of(
        st.lists(st.sampled_from(["x", "y", True]), min_size=1, max_size=3),
        st.lists(st.integers(0, 64), min_size=1, max_size=4),
    ),
    min_size=1,
)


def all_of(values):
    return [
        dict(zip(values, combination, strict=True))
        for combination in itertools.product(*values.values())
    ]


@given(VALUES)
def test_similarity_is_symmetric_and_greatest_to_itself(values):
    space = space_of(values)
    codes = space.encode(all_of(values))
    for similarity in space.similarities(codes, codes):
        assert similarity == pytest.approx(similarity.T)
        assert (similarity <= np.diag(similarity)[:, None] + 1e-9).all()
        assert (similarity >= -1e-9).all()


@given(VALUES)
def test_pairs_are_products_of_single_settings(values):
    space = space_of(values)
    codes = space.encode(all_of(values))
    each = [
        setting.correlations[np.ix_(codes[:, number], codes[:, number])]
        for number, setting in enumerate(space.settings)
    ]
    singles, pairs = space.similarities(codes, codes)
    expected = np.zeros_like(pairs)
    for first, second in itertools.combinations(each, 2):
        expected += first * second
    assert pairs == pytest.approx(expected)
    assert singles == pytest.approx(sum(each, np.zeros_like(singles)))


@given(st.lists(st.integers(1, 10_000), min_size=3, max_size=3, unique=True))
def test_closer_numbers_are_more_alike(numbers):
    least, middle, most = sorted(numbers)
    (setting,) = space_of({"size": (least, middle, most)}).settings
    nearest, farther, farthest = (setting.correlations[0, code] for code in range(3))
    assert nearest == 1 >= farther >= farthest


@pytest.mark.parametrize(
    "values",
    [
        pytest.param((False, True), id="truth values"),
        pytest.param(("1", "2"), id="texts"),
        pytest.param((-1, 1), id="negative numbers"),
        pytest.param((1, "auto"), id="mixed"),
    ],
)
def test_other_values_are_equal_or_different(values):
    (setting,) = space_of({"setting": values}).settings
    assert (setting.correlations == np.eye(2)).all()


def test_fixed_settings_are_left_out():
    space = space_of({"fixed": ("a",), "size": (1, 2)})
    assert [setting.name for setting in space.settings] == ["size"]


def test_unknown_value_is_rejected():
    with pytest.raises(KeyError):
        space_of({"size": (1, 2)}).encode([{"size": 3}])


def test_values_keep_their_order():
    configurations = [{"a": 2, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert values_in(configurations) == {"a": [2, 1], "b": ["x", "y"]}
