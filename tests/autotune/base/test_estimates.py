"""Figures with their uncertainty, and the comparison of two."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.base.estimates import (
    TOO_NOISY,
    difference,
    estimate_single,
    reason_without_bounds,
)
from autotune.base.interval import Interval
from autotune.base.window_statistics import estimate_windows

rates = st.floats(1e-3, 1e9)


def test_rejects_difference_of_two_scales():
    rate = estimate_single(4.0)
    share = estimate_single(1.0, scale="linear")
    with pytest.raises(ValueError, match="scale"):
        difference(rate, share)


@given(st.lists(rates, min_size=3, max_size=9), st.lists(rates, min_size=3, max_size=9))
def test_swapped_sides_give_inverse_difference(first, second):
    a = estimate_windows(first)
    b = estimate_windows(second)
    assume(a.variance and b.variance)
    change = difference(a, b)
    inverse = difference(b, a)
    assert change.value == pytest.approx(1 / inverse.value)
    assert (change.low is None) == (inverse.low is None)
    assert change.low is None or change.low <= change.value <= change.high
    if change.low is not None and 1e-100 < inverse.high < 1e100:
        assert change.low == pytest.approx(1 / inverse.high)


SINGLE = estimate_single(4.0)
NOISY = estimate_windows([1.0, 4.0, 0.5])
ALSO_NOISY = estimate_windows([1.0, 3.0, 0.4])


def test_single_figures_have_difference_without_bounds():
    assert difference(SINGLE, estimate_single(5.0)) == Interval(value=1.25)


def test_noisy_windows_have_difference_without_bounds():
    assert difference(NOISY, ALSO_NOISY).low is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        pytest.param(ALSO_NOISY, TOO_NOISY, id="noisy"),
        pytest.param(SINGLE, "one figure shows no spread", id="single"),
    ],
)
def test_gives_reason_without_bounds(other, reason):
    assert reason_without_bounds(NOISY, other) == reason


def test_shares_may_be_zero():
    zero = estimate_single(0.0, scale="linear")
    assert difference(zero, zero).value == 0
