"""Bounds of windows hold the true value as often as they say."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.estimates import Estimate
from autotune.base.interval import NOT_ENOUGH, Interval
from autotune.base.window_statistics import (
    estimate_from_bounds,
    estimate_windows,
    paired_ratio,
    trimmed_mean,
)

NOISE = 0.05
"""Standard deviation of simulated windows, as a share of their mean."""
rates = st.floats(1e-3, 1e9)
window_rates = st.lists(st.floats(0.1, 1e6), min_size=3, max_size=20)


def normal_noise(rng, n):
    """Return deviations of n windows that are normally distributed."""
    return rng.normal(0, NOISE, n)


def heavy_tails(rng, n):
    """Return deviations of n windows with large ones more often than normal noise."""
    return 0.5 * NOISE * rng.standard_t(3, n)


def some_held_up(rng, n):
    """Return deviations of n windows, with one in ten slower by 0.3 on average."""
    noise = rng.normal(0, NOISE, n)
    is_held_up = rng.random(n) < 0.1
    return noise - is_held_up * rng.exponential(0.3, n)


@pytest.mark.parametrize("n", [5, 6, 8, 10, 15, 20, 30])
@pytest.mark.parametrize("draw", [normal_noise, heavy_tails, some_held_up])
def test_bounds_of_windows_hold_true_value(draw, n):
    rng = np.random.default_rng(n)
    truth = np.mean([trimmed_mean(list(draw(rng, n))) for _ in range(4000)])
    estimates = [
        estimate_windows(list(draw(rng, n)), scale="linear") for _ in range(1500)
    ]
    # Bounds of a trimmed mean are approximate, and hold a mean of skewed noise less
    # often. Of 1,500 estimates, chance is a standard deviation of 0.006 at 95 %, and of
    # 0.004 at 98 %.
    assert 0.92 <= _coverage(estimates, truth, 0.95) <= 0.998
    assert 0.955 <= _coverage(estimates, truth, 0.98) <= 0.998


@pytest.mark.parametrize("n", [3, 4])
def test_bounds_of_few_windows_are_exact(n):
    # So few windows are not trimmed, and Student's bounds of normal noise are exact.
    rng = np.random.default_rng(n)
    estimates = [
        estimate_windows(list(normal_noise(rng, n)), scale="linear")
        for _ in range(4000)
    ]
    for confidence in (0.95, 0.98):
        coverage = _coverage(estimates, 0.0, confidence)
        # Of 4,000 estimates, chance is a standard deviation of 0.0034 at 95 %, and less
        # at 98 %: this is more than three of them.
        assert coverage == pytest.approx(confidence, abs=0.011)


def _coverage(estimates: list[Estimate], truth: float, confidence: float) -> float:
    """Return the share of estimates whose bounds hold the true value."""
    intervals = [estimate.interval(confidence) for estimate in estimates]
    return np.mean([interval.low <= truth <= interval.high for interval in intervals])


@given(window_rates)
def test_windows_lie_within_their_bounds(values):
    estimate = estimate_windows(values)
    assert min(values) * (1 - 1e-9) <= estimate.value <= max(values) * (1 + 1e-9)
    interval = estimate.interval()
    if interval.low is not None:
        assert interval.low * (1 - 1e-9) <= interval.value
        assert interval.value <= interval.high * (1 + 1e-9)


@given(window_rates, st.floats(0.5, 2))
def test_estimate_scales_with_its_windows(values, factor):
    estimate = estimate_windows(values)
    scaled = estimate_windows([value * factor for value in values])
    assert math.isclose(estimate.value * factor, scaled.value, rel_tol=1e-9)
    assert estimate.variance == pytest.approx(scaled.variance, rel=1e-6, abs=1e-12)


def test_bounds_of_three_windows_are_students():
    logarithms = (0.0, 0.1, 0.2)
    estimate = estimate_windows([math.exp(value) for value in logarithms])
    interval = estimate.interval()
    mean = 0.1
    standard_deviation = 0.1
    # Student's quantile at 95 % with two degrees of freedom.
    half_width = 4.303 * standard_deviation / math.sqrt(3)
    # The table's quantile has three decimals.
    assert math.log(interval.high) == pytest.approx(mean + half_width, abs=1e-4)
    assert interval.confidence == 0.95


def test_leaves_out_bounds_too_wide_to_use():
    estimate = estimate_windows([1000.0, 2800.0, 7700.0])
    assert estimate.interval() == Interval(value=estimate.value)


def test_no_windows_have_no_estimate():
    with pytest.raises(ValueError, match="no figures"):
        estimate_windows([])


@pytest.mark.parametrize(
    "values", [pytest.param([2.0], id="one"), pytest.param([2.0, 2.2], id="two")]
)
def test_two_windows_are_not_enough(values):
    estimate = estimate_windows(values)
    assert estimate.interval() == Interval(value=estimate.value)
    assert estimate.reason_without_variance == NOT_ENOUGH


def test_ratio_clear_of_one_has_wide_bounds():
    ratio = paired_ratio([(rate, 1.0) for rate in (5.0, 9.0, 7.0, 14.0, 8.0)])
    assert ratio.low is not None
    assert ratio.low > 1
    assert ratio.high / ratio.value > 1.5  # too wide for another figure


def test_wide_ratio_around_one_has_no_bounds():
    assert paired_ratio([(0.5, 1.0), (2.0, 1.0), (1.0, 1.0)]).low is None


def test_constant_ratio_has_bounds_at_its_value():
    ratio = paired_ratio([(99.0, 100.0)] * 6)
    assert ratio.low == pytest.approx(0.99)
    assert ratio.high == pytest.approx(0.99)
    assert ratio.confidence == 0.98


def test_one_window_in_five_hardly_moves_estimate():
    steady = [1.0, 1.01, 0.99, 1.02, 0.98]
    held_up = [1.0, 1.01, 0.99, 1.02, 0.3]
    # The lowest window is trimmed in both; the mean of all would fall by 14 %.
    assert estimate_windows(held_up).value == pytest.approx(
        estimate_windows(steady).value, rel=0.01
    )
    ratio = paired_ratio([(rate, 0.5) for rate in held_up], confidence=0.95)
    assert ratio.value == pytest.approx(2.0, rel=0.01)
    assert ratio.high / ratio.low < 1.1


@given(st.lists(rates, min_size=1, max_size=12), st.floats(0.01, 100))
def test_finds_constant_ratio_under_drift(others, factor):
    ratio = paired_ratio([(factor * rate, rate) for rate in others])
    assert ratio.value == pytest.approx(factor)
    assert (ratio.low is None) == (len(others) < 3)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e6), st.floats(1.0, 1e6)), min_size=3, max_size=30
    )
)
def test_swapped_pairs_give_inverse_ratio(pairs):
    ratio = paired_ratio(pairs)
    inverse = paired_ratio([(second, first) for first, second in pairs])
    assert ratio.value == pytest.approx(1 / inverse.value)
    assert ratio.low is None or ratio.low == pytest.approx(1 / inverse.high)


def test_more_candidates_widen_bounds():
    pairs = [(rate, 100.0) for rate in (100.0, 103.0, 101.0, 105.0, 102.0, 104.0)]
    alone, of_two, of_six = (
        paired_ratio(pairs, candidates=candidates) for candidates in (1, 2, 6)
    )
    assert of_six.value == alone.value
    assert of_six.low < of_two.low < alone.low < alone.high < of_two.high < of_six.high


def equal_rates(rng: random.Random) -> list[tuple[float, float]]:
    """Return six pairs of rates that differ by noise of 8 % only."""
    return [(math.exp(rng.gauss(0, 0.08)), 1.0) for _ in range(6)]


def share_above_one(candidates: int) -> float:
    """Return how often the highest of six equal ratios has a lower bound above 1.

    Args:
        candidates: Number of ratios by which its bounds are widened.
    """
    rng = random.Random(7)
    experiments = 600
    wrong = 0
    for _ in range(experiments):
        pairs_of_ratios = [equal_rates(rng) for _ in range(6)]
        highest = max(pairs_of_ratios, key=lambda pairs: paired_ratio(pairs).value)
        low = paired_ratio(highest, candidates=candidates).low
        if low is not None and low > 1:
            wrong += 1
    return wrong / experiments


def test_highest_of_equal_ratios_is_seldom_above_one():
    # The confidence is 98 %.
    assert share_above_one(candidates=6) <= 0.02


def test_unwidened_bounds_are_too_often_above_one():
    assert share_above_one(candidates=1) > 0.02


def test_stored_bounds_give_back_variance():
    estimate = estimate_windows([90.0, 101.0, 99.0, 104.0])
    restored = estimate_from_bounds(estimate.interval(), estimate.n)
    assert restored.variance == pytest.approx(estimate.variance)


@pytest.mark.parametrize(
    ("low", "high"),
    [pytest.param(None, None, id="none"), pytest.param(0.0, 1.0, id="not positive")],
)
def test_unusable_bounds_give_no_variance(low, high):
    interval = Interval(value=1.0, low=low, high=high, confidence=0.98)
    assert estimate_from_bounds(interval, 1).variance is None


def test_bounds_of_prediction_are_normal():
    # 2.326 standard deviations of a normal distribution hold 98 % of it.
    interval = Interval(
        value=100.0,
        low=100 * math.exp(-0.02326),
        high=100 * math.exp(0.02326),
        confidence=0.98,
    )
    estimate = estimate_from_bounds(interval)
    # The quantiles 2.326, and 1.960 at 95 %, have three decimals.
    assert estimate.variance == pytest.approx(0.01**2, rel=1e-3)
    shown = estimate.interval()
    assert math.log(shown.high / shown.low) == pytest.approx(2 * 0.0196, rel=1e-3)
