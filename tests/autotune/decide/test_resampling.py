import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.decide.resampling import paired_ratio

figures = st.floats(1.0, 1e6)


@given(st.lists(st.tuples(figures, figures), min_size=3, max_size=30))
@settings(max_examples=30, deadline=None)
def test_a_paired_ratio_turns_over_with_its_pairs(pairs):
    found, turned = paired_ratio(pairs), paired_ratio([(second, first) for first, second in pairs])
    assert found.value == pytest.approx(1 / turned.value)
    assert found.low is not None
    assert found.low <= found.high


def test_two_pairs_show_no_spread():
    found = paired_ratio([(2.0, 1.0), (2.0, 1.0)])
    assert (found.value, found.low, found.high) == (pytest.approx(2.0), None, None)


def test_pairs_that_are_all_alike_prove_their_ratio():
    found = paired_ratio([(99.0, 100.0)] * 6)
    assert found.low == pytest.approx(0.99)
    assert found.high == pytest.approx(0.99)


def test_the_more_ratios_one_was_picked_from_the_wider_are_its_bounds():
    pairs = [(100.0 + n, 100.0) for n in (0, 3, 1, 5, 2, 4)]
    alone, of_two, of_six = (paired_ratio(pairs, of=of) for of in (1, 2, 6))
    assert of_six.value == alone.value
    assert of_six.low < of_two.low < alone.low < alone.high < of_two.high < of_six.high


def falsely_proven(*, tries, of, rounds=6, repeats=600):
    """How often the highest of ratios that are all 1 is proven to be above it."""
    rng = random.Random(7)
    wrong = 0
    for _ in range(repeats):
        every = [[(math.exp(rng.gauss(0, 0.08)), 1.0) for _ in range(rounds)] for _ in range(tries)]
        highest = max(every, key=lambda pairs: paired_ratio(pairs).value)
        wrong += paired_ratio(highest, of=of).low > 1
    return wrong / repeats


def test_the_highest_of_equal_ratios_is_seldom_proven_to_be_higher_where_all_of_them_count():
    assert falsely_proven(tries=6, of=6) <= 0.02
    assert falsely_proven(tries=6, of=1) > 0.02
