import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.statistics import paired_ratio

figures = st.floats(0.1, 1e6)
pairs = st.lists(st.tuples(figures, figures), min_size=2, max_size=20)


@given(pairs)
def test_the_ratio_lies_within_its_bounds(values):
    found = paired_ratio([a for a, _ in values], [b for _, b in values])
    assert found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9)


@given(pairs, st.floats(0.5, 2))
def test_what_drifts_in_both_cancels(values, drift):
    plain = paired_ratio([a for a, _ in values], [b for _, b in values])
    drifted = paired_ratio(
        [a * drift**i for i, (a, _) in enumerate(values)], [b * drift**i for i, (_, b) in enumerate(values)]
    )
    assert math.isclose(plain.value, drifted.value, rel_tol=1e-6)


def test_one_pair_shows_no_spread():
    found = paired_ratio([2.0], [1.0])
    assert (found.value, found.low, found.high) == (2.0, None, None)


def test_the_interval_of_three_pairs_uses_students_quantile():
    logs = [0.0, 0.1, 0.2]
    found = paired_ratio([math.exp(value) for value in logs], [1.0] * 3)
    assert math.log(found.high) == pytest.approx(0.1 + 4.303 * 0.1 / math.sqrt(3))


def test_no_pairs_and_unequal_numbers_are_refused():
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([], [])
    with pytest.raises(ValueError, match="argument 2"):
        paired_ratio([1.0], [1.0, 2.0])
