"""Figures with their uncertainty, and the comparison of two."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.base.estimates import (
    TOO_NOISY,
    Estimate,
    change_between,
    estimate_single,
    reason_without_bounds,
)
from autotune.base.interval import Interval
from autotune.base.window_statistics import estimate_windows

rates = st.floats(1e-3, 1e9)


def test_rejects_variance_without_degrees_of_freedom():
    with pytest.raises(ValueError, match="variance with 0 degrees"):
        Estimate(value=1.0, n=2, variance=0.1)


def test_rejects_change_between_two_scales():
    rate = estimate_single(4.0)
    share = estimate_single(1.0, scale="linear")
    with pytest.raises(ValueError, match="scale"):
        change_between(rate, share)


@given(
    rates_before=st.lists(rates, min_size=3, max_size=9),
    rates_after=st.lists(rates, min_size=3, max_size=9),
)
def test_swapped_sides_give_inverse_change(rates_before, rates_after):
    before = estimate_windows(rates_before)
    after = estimate_windows(rates_after)
    assume(before.variance and after.variance)
    change = change_between(before, after)
    inverse = change_between(after, before)
    assert change.value == pytest.approx(1 / inverse.value)
    assert (change.low is None) == (inverse.low is None)
    if change.low is not None:
        assert change.low <= change.value <= change.high
        # Bounds of inverse figures beyond these are not floats.
        if 1e-100 < inverse.high < 1e100:
            assert change.low == pytest.approx(1 / inverse.high)


SINGLE = estimate_single(4.0)
NOISY = estimate_windows([1.0, 4.0, 0.5])
ALSO_NOISY = estimate_windows([1.0, 3.0, 0.4])


def test_single_figures_have_change_without_bounds():
    assert change_between(SINGLE, estimate_single(5.0)) == Interval(value=1.25)


def test_noisy_windows_have_change_without_bounds():
    assert change_between(NOISY, ALSO_NOISY).low is None


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
    assert change_between(zero, zero).value == 0
