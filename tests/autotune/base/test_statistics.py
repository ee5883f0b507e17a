import itertools
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.base.estimates import (
    TOO_NOISY,
    Estimate,
    difference,
    estimate_single,
    reason_without_bounds,
)
from autotune.base.interval import NOT_ENOUGH, Interval
from autotune.base.step_statistics import block_count, estimate_steps, paired_difference
from autotune.base.student_t import t_quantile
from autotune.base.window_statistics import (
    estimate_from_bounds,
    estimate_windows,
    paired_ratio,
    trimmed_mean,
)
from tests.autotune.advice.runs import noisy

NOISE = 0.05
window_rates = st.lists(st.floats(0.1, 1e6), min_size=3, max_size=20)
rates = st.floats(1e-3, 1e9)
confidences = st.floats(0.5, 0.999)

# Two-sided quantiles at 90, 95, 98 and 99 %, as tables of Student's distribution print
# them: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
TABLE = {
    1: (6.314, 12.706, 31.821, 63.657),
    2: (2.920, 4.303, 6.965, 9.925),
    3: (2.353, 3.182, 4.541, 5.841),
    4: (2.132, 2.776, 3.747, 4.604),
    5: (2.015, 2.571, 3.365, 4.032),
    7: (1.895, 2.365, 2.998, 3.499),
    10: (1.812, 2.228, 2.764, 3.169),
    15: (1.753, 2.131, 2.602, 2.947),
    20: (1.725, 2.086, 2.528, 2.845),
    30: (1.697, 2.042, 2.457, 2.750),
    60: (1.671, 2.000, 2.390, 2.660),
    120: (1.658, 1.980, 2.358, 2.617),
    math.inf: (1.645, 1.960, 2.326, 2.576),
}


@pytest.mark.parametrize(("freedom", "expected"), TABLE.items())
def test_students_quantiles_match_table(freedom, expected):
    quantiles = [
        t_quantile(confidence, freedom) for confidence in (0.90, 0.95, 0.98, 0.99)
    ]
    assert quantiles == pytest.approx(expected, abs=0.00051)


@given(confidences, st.floats(1, 200))
def test_students_quantile_falls_towards_normal_one(confidence, freedom):
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    quantile = t_quantile(confidence, freedom)
    assert quantile >= t_quantile(confidence, freedom + 1) >= normal
    assert t_quantile(confidence, 10**7) == pytest.approx(normal, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: t_quantile(0.95, 0), "0 degrees", id="no freedom"),
        pytest.param(lambda: estimate_windows([]), "no figures", id="no windows"),
        pytest.param(
            lambda: difference(
                estimate_single(4.0), estimate_single(1.0, scale="linear")
            ),
            "scale",
            id="two scales",
        ),
    ],
)
def test_rejects_figures_without_answer(call, message):
    with pytest.raises(ValueError, match=message):
        call()


DRAWS = {
    "normal": lambda rng, n: rng.normal(0, NOISE, n),
    "heavy tails": lambda rng, n: 0.5 * NOISE * rng.standard_t(3, n),
    # One window in ten lasts longer, by a third on average.
    "held up": lambda rng, n: (
        rng.normal(0, NOISE, n) - (rng.random(n) < 0.1) * rng.exponential(0.3, n)
    ),
}


@pytest.mark.parametrize("n", [5, 6, 8, 10, 15, 20, 30])
@pytest.mark.parametrize("name", DRAWS)
def test_bounds_of_windows_hold_true_value(name, n):
    rng = np.random.default_rng(n)
    draw = DRAWS[name]
    truth = np.mean([trimmed_mean(list(draw(rng, n))) for _ in range(4000)])
    estimates = [
        estimate_windows(list(draw(rng, n)), scale="linear") for _ in range(1500)
    ]
    assert 0.92 <= _coverage(estimates, truth, 0.95) <= 0.998
    assert 0.955 <= _coverage(estimates, truth, 0.98) <= 0.998


@pytest.mark.parametrize("n", [3, 4])
def test_bounds_of_few_windows_are_exact(n):
    # So few windows are not trimmed, so their bounds hold neither less often than they
    # say, nor more often.
    rng = np.random.default_rng(n)
    draw = DRAWS["normal"]
    estimates = [
        estimate_windows(list(draw(rng, n)), scale="linear") for _ in range(4000)
    ]
    for confidence in (0.95, 0.98):
        coverage = _coverage(estimates, 0.0, confidence)
        assert confidence - 0.011 <= coverage <= confidence + 0.011


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
    estimate = estimate_windows([math.exp(value) for value in (0.0, 0.1, 0.2)])
    interval = estimate.interval()
    expected = 0.1 + 4.303 * 0.1 / math.sqrt(3)
    assert math.log(interval.high) == pytest.approx(expected, abs=1e-4)
    assert interval.confidence == 0.95


def test_leaves_out_bounds_too_wide_to_use():
    estimate = estimate_windows([1000.0, 2800.0, 7700.0])
    assert estimate.interval() == Interval(value=estimate.value)


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.2]])
def test_two_windows_are_not_enough(values):
    estimate = estimate_windows(values)
    assert estimate.interval() == Interval(value=estimate.value)
    assert estimate.no_spread == NOT_ENOUGH


def test_ratio_clear_of_one_has_wide_bounds():
    ratio = paired_ratio([(rate, 1.0) for rate in (5.0, 9.0, 7.0, 14.0, 8.0)])
    assert ratio.low is not None
    assert ratio.low > 1
    assert ratio.high / ratio.value > 1.5


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
    pairs = [(100.0 + n, 100.0) for n in (0, 3, 1, 5, 2, 4)]
    alone, of_two, of_six = (
        paired_ratio(pairs, candidates=candidates) for candidates in (1, 2, 6)
    )
    assert of_six.value == alone.value
    assert of_six.low < of_two.low < alone.low < alone.high < of_two.high < of_six.high


@pytest.mark.parametrize(("candidates", "is_seldom"), [(6, True), (1, False)])
def test_highest_of_equal_ratios_is_seldom_above_one(candidates, is_seldom):
    rng = random.Random(7)
    wrong = 0
    for _ in range(600):
        ratios = [
            [(math.exp(rng.gauss(0, 0.08)), 1.0) for _ in range(6)] for _ in range(6)
        ]
        highest = max(ratios, key=lambda pairs: paired_ratio(pairs).value)
        low = paired_ratio(highest, candidates=candidates).low
        wrong += low is not None and low > 1
    assert (wrong / 600 <= 0.02) == is_seldom


def _steps(seed: int, n: int, memory: float, *, mean: float = 1.0) -> Estimate:
    """Return the rate of steps that remember each other."""
    return estimate_steps(
        [1.0] * n,
        [
            1 / rate
            for rate in noisy(seed, n, autocorrelation=memory, noise=NOISE, mean=mean)
        ],
    )


def _difference_of_runs(seed: int, n: int, memory: float, ratio: float) -> Interval:
    """Return the difference of two runs, of which the second has this speed."""
    return difference(
        _steps(2 * seed, n, memory), _steps(2 * seed + 1, n, memory, mean=ratio)
    )


def _is_different(change: Interval) -> bool:
    return change.low is not None and not change.low <= 1 <= change.high


@pytest.mark.parametrize(
    ("n", "memory"), [*itertools.product((40, 120, 400), (0.0, 0.5, 0.8, 0.9))]
)
def test_same_speed_is_seldom_found_different(n, memory):
    runs = 400
    changes = [_difference_of_runs(seed, n, memory, 1.0) for seed in range(runs)]
    different = sum(_is_different(change) for change in changes)
    # Their share may be off by as much as so many tries allow.
    chance = 2.6 * math.sqrt(0.05 * 0.95 / runs)
    assert different / runs <= 0.05 + chance


@pytest.mark.parametrize(
    ("n", "memory"), [(60, 0.0), (200, 0.5), (600, 0.8), (2000, 0.9)]
)
def test_finds_five_percent_with_enough_steps(n, memory):
    runs = 100
    changes = [_difference_of_runs(seed, n, memory, 0.95) for seed in range(runs)]
    without_bounds = sum(change.low is None for change in changes)
    assert sum(_is_different(change) for change in changes) / runs >= 0.85
    assert without_bounds / runs <= 0.05


@given(st.lists(st.tuples(rates, st.floats(1e-3, 1e3)), min_size=1, max_size=200))
def test_rate_is_all_amounts_over_all_sizes(steps):
    amounts, sizes = zip(*steps, strict=True)
    estimate = estimate_steps(amounts, sizes)
    assert estimate.value == pytest.approx(sum(amounts) / sum(sizes))
    assert estimate.n == len(amounts)


@given(st.lists(rates, min_size=1, max_size=200))
def test_there_are_four_to_sixteen_blocks(amounts):
    blocks = block_count([math.log(amount) for amount in amounts])
    assert blocks == 0 or 4 <= blocks <= min(16, len(amounts))


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


def test_stored_bounds_give_back_variance():
    estimate = estimate_windows([90.0, 101.0, 99.0, 104.0])
    restored = estimate_from_bounds(estimate.interval(), estimate.n)
    assert restored.variance == pytest.approx(estimate.variance, rel=1e-3)


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
    assert estimate.variance == pytest.approx(0.01**2, rel=1e-3)
    shown = estimate.interval()
    assert math.log(shown.high / shown.low) == pytest.approx(2 * 0.0196, rel=1e-3)


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


def test_few_slow_steps_have_no_spread():
    estimate = _steps(2, 40, 0.97)
    assert estimate.variance is None
    assert estimate.no_spread == "too few steps for how slowly they vary"
    assert estimate.interval() == Interval(value=estimate.value)


def test_shares_differ_by_points():
    rng = np.random.default_rng(3)
    without, with_waits = (
        estimate_steps(
            [wait + 0.001 * rng.random() for _ in range(40)],
            [1.0] * 40,
            scale="linear",
        )
        for wait in (0.0, 0.1)
    )
    change = difference(without, with_waits)
    assert change.value == pytest.approx(0.1, abs=0.002)
    assert change.low is not None
    assert change.low > 0.09


def test_shares_may_be_zero():
    zero = estimate_single(0.0, scale="linear")
    assert difference(zero, zero).value == 0


def test_losses_of_same_steps_differ_by_unshared_part():
    rng = np.random.default_rng(3)
    losses = [5 * math.exp(-step / 50) + 3 + 0.2 * rng.normal() for step in range(100)]
    others = [1.02 * loss * math.exp(0.002 * rng.normal()) for loss in losses]
    change = paired_difference(losses, others)
    assert change.value == pytest.approx(1.02, abs=0.001)
    assert 1.015 < change.low < change.high < 1.025
