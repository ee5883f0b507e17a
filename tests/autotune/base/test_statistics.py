import itertools
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.base import statistics as decided
from autotune.base.interval import NOT_ENOUGH, Interval
from autotune.base.statistics import (
    Estimate,
    difference,
    estimate_from_bounds,
    estimate_single,
    estimate_steps,
    estimate_windows,
    paired_ratio,
    trimmed_mean,
)
from tests.autotune.advice.runs import noisy

NOISE = 0.05
figures = st.lists(st.floats(0.1, 1e6), min_size=3, max_size=20)
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


@pytest.mark.parametrize(("freedom", "row"), TABLE.items())
def test_students_quantiles_are_those_of_the_table(freedom, row):
    found = [
        decided.t_quantile(confidence, freedom)
        for confidence in (0.90, 0.95, 0.98, 0.99)
    ]
    assert found == pytest.approx(row, abs=0.00051)


@given(confidences, st.floats(1, 200))
def test_students_quantile_falls_with_the_freedom_towards_the_normal_one(
    confidence, freedom
):
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    assert (
        decided.t_quantile(confidence, freedom)
        >= decided.t_quantile(confidence, freedom + 1)
        >= normal
    )
    assert decided.t_quantile(confidence, 10**7) == pytest.approx(normal, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: decided.t_quantile(0.95, 0), "0 degrees"),
        (lambda: estimate_windows([]), "no figures"),
        (
            lambda: difference(
                estimate_single(4.0), estimate_single(1.0, scale="linear")
            ),
            "scale",
        ),
    ],
)
def test_what_has_no_answer_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


DRAWS = {
    "normal": lambda rng, n: rng.normal(0, NOISE, n),
    "heavy": lambda rng, n: 0.5 * NOISE * rng.standard_t(3, n),
    # One in ten lasts longer, by a third of it in the mean.
    "held up": lambda rng, n: (
        rng.normal(0, NOISE, n) - (rng.random(n) < 0.1) * rng.exponential(0.3, n)
    ),
}
NORMAL = (("normal", 3), ("normal", 4))
"""Of which fewer windows than are trimmed hold as often as they say, and no more
often."""


@pytest.mark.parametrize(
    ("name", "n"), [*itertools.product(DRAWS, [5, 6, 8, 10, 15, 20, 30]), *NORMAL]
)
def test_bounds_of_windows_hold_their_location_as_often_as_they_say(name, n):
    rng, draw, exact = np.random.default_rng(n), DRAWS[name], n < 5
    truth = (
        0.0
        if exact
        else np.mean([trimmed_mean(list(draw(rng, n))) for _ in range(4000)])
    )
    found = [
        estimate_windows(list(draw(rng, n)), scale="linear")
        for _ in range(4000 if exact else 1500)
    ]
    for confidence, least, most in ((0.95, 0.92, 0.998), (0.98, 0.955, 0.998)):
        every = [one.interval(confidence) for one in found]
        low, high = (confidence - 0.011, confidence + 0.011) if exact else (least, most)
        assert low <= np.mean([one.low <= truth <= one.high for one in every]) <= high


@given(figures, st.floats(0.5, 2))
def test_windows_lie_within_their_bounds_and_scale_with_their_figures(values, factor):
    plain, scaled = (
        estimate_windows(values),
        estimate_windows([value * factor for value in values]),
    )
    assert min(values) * (1 - 1e-9) <= plain.value <= max(values) * (1 + 1e-9)
    assert math.isclose(plain.value * factor, scaled.value, rel_tol=1e-9)
    assert plain.variance == pytest.approx(scaled.variance, rel=1e-6, abs=1e-12)
    found = plain.interval()
    assert found.low is None or found.low * (1 - 1e-9) <= found.value <= found.high * (
        1 + 1e-9
    )


def test_the_bounds_of_three_windows_are_students_and_two_windows_are_not_enough():
    found = estimate_windows([math.exp(value) for value in (0.0, 0.1, 0.2)]).interval()
    assert math.log(found.high) == pytest.approx(
        0.1 + 4.303 * 0.1 / math.sqrt(3), abs=1e-4
    )
    assert found.confidence == 0.95
    apart = estimate_windows([1000.0, 2800.0, 7700.0])
    # Bounds that far say nothing.
    assert apart.interval() == Interval(value=apart.value)
    for few in ([2.0], [2.0, 2.2]):
        found = estimate_windows(few)
        assert (found.interval(), found.no_spread) == (
            Interval(value=found.value),
            NOT_ENOUGH,
        )


def test_a_ratio_that_is_clear_of_one_has_bounds_however_wide():
    wide = paired_ratio([(high, 1.0) for high in (5.0, 9.0, 7.0, 14.0, 8.0)])
    assert wide.low is not None and wide.low > 1 and wide.high / wide.value > 1.5
    assert paired_ratio([(0.5, 1.0), (2.0, 1.0), (1.0, 1.0)]).low is None
    alike = paired_ratio([(99.0, 100.0)] * 6)
    assert (alike.low, alike.high, alike.confidence) == (
        pytest.approx(0.99),
        pytest.approx(0.99),
        0.98,
    )


def test_one_reading_in_five_hardly_moves_the_location_or_a_ratio():
    steady, held_up = [1.0, 1.01, 0.99, 1.02, 0.98], [1.0, 1.01, 0.99, 1.02, 0.3]
    assert estimate_windows(held_up).value == pytest.approx(
        estimate_windows(steady).value, rel=0.01
    )
    ratio = paired_ratio([(rate, 0.5) for rate in held_up], confidence=0.95)
    assert ratio.value == pytest.approx(2.0, rel=0.01)
    assert ratio.high / ratio.low < 1.1


@given(st.lists(rates, min_size=1, max_size=12), st.floats(0.01, 100))
def test_a_constant_ratio_is_found_whatever_drifts_between_rounds(others, factor):
    found = paired_ratio([(factor * rate, rate) for rate in others])
    assert found.value == pytest.approx(factor)
    assert (found.low is None) == (len(others) < 3)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e6), st.floats(1.0, 1e6)), min_size=3, max_size=30
    )
)
def test_a_paired_ratio_turns_over_with_its_pairs(pairs):
    found, turned = (
        paired_ratio(pairs),
        paired_ratio([(second, first) for first, second in pairs]),
    )
    assert found.value == pytest.approx(1 / turned.value)
    assert found.low is None or found.low == pytest.approx(1 / turned.high)


def test_the_more_ratios_one_was_picked_from_the_wider_are_its_bounds():
    alone, of_two, of_six = (
        paired_ratio(
            [(100.0 + n, 100.0) for n in (0, 3, 1, 5, 2, 4)], candidates=candidates
        )
        for candidates in (1, 2, 6)
    )
    assert of_six.value == alone.value
    assert of_six.low < of_two.low < alone.low < alone.high < of_two.high < of_six.high


@pytest.mark.parametrize(("candidates", "is_seldom"), [(6, True), (1, False)])
def test_the_highest_of_equal_ratios_is_seldom_proven_to_be_higher_if_all_of_them_count(
    candidates, is_seldom
):
    rng = random.Random(7)
    wrong = 0
    for _ in range(600):
        every = [
            [(math.exp(rng.gauss(0, 0.08)), 1.0) for _ in range(6)] for _ in range(6)
        ]
        highest = max(every, key=lambda pairs: paired_ratio(pairs).value)
        wrong += (paired_ratio(highest, candidates=candidates).low or 0.0) > 1
    assert (wrong / 600 <= 0.02) == is_seldom


def _steps(seed: int, n: int, memory: float, *, mean: float = 1.0) -> Estimate:
    """The rate of steps that remember each other."""
    return estimate_steps(
        [1.0] * n,
        [1 / rate for rate in noisy(seed, n, memory=memory, noise=NOISE, mean=mean)],
    )


SAME = [(n, memory, 1.0) for n in (40, 120, 400) for memory in (0.0, 0.5, 0.8, 0.9)]
SLOWER = [(60, 0.0, 0.95), (200, 0.5, 0.95), (600, 0.8, 0.95), (2000, 0.9, 0.95)]


@pytest.mark.parametrize(("n", "memory", "ratio"), [*SAME, *SLOWER])
def test_five_per_cent_are_found_with_enough_steps_and_the_same_speed_hardly_ever(
    n, memory, ratio
):
    found = silent = 0
    pairs = 400 if ratio == 1 else 100
    for seed in range(pairs):
        change = difference(
            _steps(2 * seed, n, memory), _steps(2 * seed + 1, n, memory, mean=ratio)
        )
        silent += change.low is None
        found += change.low is not None and not change.low <= 1 <= change.high
    if ratio == 1:
        # And what so many tries may be off by.
        assert found / pairs <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / pairs)
    else:
        assert found / pairs >= 0.85
        assert silent / pairs <= 0.05


@given(st.lists(st.tuples(rates, st.floats(1e-3, 1e3)), min_size=1, max_size=200))
def test_a_rate_is_all_amounts_over_all_sizes_and_blocks_are_some_and_no_more_than_steps(
    steps,
):
    amounts, sizes = zip(*steps, strict=True)
    found = estimate_steps(amounts, sizes)
    assert (found.value, found.n) == (
        pytest.approx(sum(amounts) / sum(sizes)),
        len(amounts),
    )
    blocks = decided.block_count([math.log(amount) for amount in amounts])
    assert blocks == 0 or 4 <= blocks <= min(16, len(steps))


@given(st.lists(rates, min_size=3, max_size=9), st.lists(rates, min_size=3, max_size=9))
def test_the_other_way_round_it_is_the_inverse(first, second):
    a, b = estimate_windows(first), estimate_windows(second)
    assume(a.variance and b.variance)
    there, back = difference(a, b), difference(b, a)
    assert there.value == pytest.approx(1 / back.value)
    assert (there.low is None) == (back.low is None)
    assert there.low is None or there.low <= there.value <= there.high
    if there.low is not None and 1e-100 < back.high < 1e100:
        assert there.low == pytest.approx(1 / back.high)


def test_bounds_that_were_kept_give_back_the_spread_they_came_from():
    readings = [90.0, 101.0, 99.0, 104.0]
    again = estimate_from_bounds(estimate_windows(readings).interval(), len(readings))
    assert again.variance == pytest.approx(
        estimate_windows(readings).variance, rel=1e-3
    )
    for low, high in ((None, None), (0.0, 1.0)):
        assert (
            estimate_from_bounds(
                Interval(value=1.0, low=low, high=high, confidence=0.98), 1
            ).variance
            is None
        )
    # 2.326 standard deviations of a normal one.
    low, high = (100 * math.exp(sign * 0.02326) for sign in (-1, 1))
    normal = estimate_from_bounds(
        Interval(value=100.0, low=low, high=high, confidence=0.98)
    )
    assert normal.variance == pytest.approx(0.01**2, rel=1e-3)
    assert math.log(normal.interval().high / normal.interval().low) == pytest.approx(
        2 * 0.0196, rel=1e-3
    )


def test_what_says_nothing_has_a_ratio_and_no_bounds_and_says_why():
    once, a, b = (
        estimate_single(4.0),
        estimate_windows([1.0, 4.0, 0.5]),
        estimate_windows([1.0, 3.0, 0.4]),
    )
    assert difference(once, estimate_single(5.0)) == Interval(value=1.25)
    assert difference(a, b).low is None
    assert decided.reason_without_bounds(a, b) == decided.TOO_NOISY
    assert decided.reason_without_bounds(a, once) == "one figure shows no spread"
    found = _steps(2, 40, 0.97)
    assert (found.variance, found.no_spread) == (
        None,
        "too few steps for how slowly they vary",
    )
    assert found.interval() == Interval(value=found.value)


def test_shares_differ_by_points_and_may_be_zero_and_losses_of_the_same_steps_by_what_they_do_not_share():
    rng = np.random.default_rng(3)
    waits = [[wait + 0.001 * rng.random() for _ in range(40)] for wait in (0.0, 0.1)]
    found = difference(
        *(estimate_steps(shares, [1.0] * 40, scale="linear") for shares in waits)
    )
    assert found.value == pytest.approx(0.1, abs=0.002)
    assert found.low is not None and found.low > 0.09
    assert (
        difference(
            estimate_single(0.0, scale="linear"), estimate_single(0.0, scale="linear")
        ).value
        == 0
    )
    # The batches are the same.
    shared = [5 * math.exp(-step / 50) + 3 + 0.2 * rng.normal() for step in range(100)]
    found = decided.paired_difference(
        shared, [1.02 * loss * math.exp(0.002 * rng.normal()) for loss in shared]
    )
    assert found.value == pytest.approx(1.02, abs=0.001)
    assert 1.015 < found.low < found.high < 1.025


@given(
    st.lists(st.tuples(rates, st.floats(1e-3, 1e3)), min_size=1, max_size=30),
    st.integers(0, 3),
)
def test_figures_that_are_none_are_left_out(pairs, odd):
    broken = [(math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (-1.0, 1.0)][: odd + 1]
    assert decided.estimate_plausible_steps([*broken, *pairs]) == estimate_steps(
        *zip(*pairs, strict=True)
    )
    assert decided.estimate_plausible_steps(broken) is None
