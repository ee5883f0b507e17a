import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.decide.difference import (
    block_count,
    difference,
    of_bounds,
    of_interval,
    of_one,
    of_readings,
    of_sound_steps,
    of_steps,
    paired_difference,
    t_95,
)
from autotune.decide.statistics import mean_interval

NOISE = 0.05
rates = st.floats(1e-3, 1e9)


def _seconds(rng, n: int, memory: float, *, mean_s: float = 1.0) -> list[float]:
    """Times of steps that remember each other: a first-order autoregression of their logarithms."""
    pushes = rng.normal(size=n + 300) * math.sqrt(1 - memory**2) * NOISE
    logs = list(itertools.accumulate(pushes, lambda before, push: memory * before + push))[300:]
    return [mean_s * math.exp(log) for log in logs]


def _verdicts(n: int, memory: float, *, ratio: float = 1.0, pairs: int = 400) -> tuple[float, float]:
    """Of pairs of series: how many were found to differ, and how many said nothing."""
    rng = np.random.default_rng(int(1000 * memory) + n)
    found = silent = 0
    for _ in range(pairs):
        a, b = (of_steps([1.0] * n, _seconds(rng, n, memory, mean_s=mean_s)) for mean_s in (1.0, 1 / ratio))
        change = difference(a, b)
        if change.low is None or change.high is None:
            silent += 1
        else:
            found += not change.low <= 1 <= change.high
    return found / pairs, silent / pairs


@pytest.mark.parametrize("n", [40, 120, 400])
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8, 0.9])
def test_the_same_speed_is_hardly_ever_found_to_differ_however_steps_depend_on_each_other(n, memory):
    found, _ = _verdicts(n, memory)
    assert found <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / 400)  # 5 %, and what 400 tries may be off by


def test_taking_steps_for_independent_would_cry_wolf():
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        logs = [np.log(_seconds(rng, 120, 0.9)) for _ in range(2)]
        spread = math.sqrt(sum(one.var(ddof=1) / len(one) for one in logs))
        wrong += abs(logs[0].mean() - logs[1].mean()) > 1.97 * spread
    assert wrong > 100  # of 200


@pytest.mark.parametrize(("n", "memory"), [(60, 0.0), (200, 0.5), (600, 0.8), (2000, 0.9)])
def test_five_per_cent_are_found_with_enough_steps(n, memory):
    found, silent = _verdicts(n, memory, ratio=0.95, pairs=100)
    assert found >= 0.85
    assert silent <= 0.05


def test_too_few_steps_for_their_memory_show_no_spread():
    rng = np.random.default_rng(2)
    seconds = _seconds(rng, 40, 0.97)
    found = of_steps([1.0] * 40, seconds)
    assert found.variance is None
    assert found.no_spread == "too few steps for how slowly they vary"
    assert found.interval.low is None
    assert found.value == pytest.approx(40 / sum(seconds))


@given(st.lists(rates, min_size=1, max_size=60), st.data())
def test_a_rate_is_all_amounts_over_all_sizes(amounts, data):
    sizes = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(amounts), max_size=len(amounts)))
    found = of_steps(amounts, sizes)
    assert found.value == pytest.approx(sum(amounts) / sum(sizes))
    assert found.n == len(amounts)


@given(st.lists(rates, min_size=1, max_size=200))
def test_blocks_are_some_and_no_more_than_steps(readings):
    blocks = block_count([math.log(reading) for reading in readings])
    assert blocks is None or 4 <= blocks <= min(16, len(readings))


@given(st.lists(rates, min_size=2, max_size=9), st.lists(rates, min_size=2, max_size=9))
def test_the_other_way_round_it_is_the_inverse(first, second):
    a, b = of_readings(first), of_readings(second)
    assume(a.variance and b.variance)
    there, back = difference(a, b), difference(b, a)
    assert there.value == pytest.approx(1 / back.value)
    assert there.low is not None and back.high is not None and there.high is not None
    assert there.low <= there.value <= there.high
    if 1e-100 < back.high < 1e100:
        assert there.low == pytest.approx(1 / back.high)


@given(st.lists(rates, min_size=2, max_size=9), st.floats(0.1, 10))
def test_a_common_factor_changes_nothing(readings, factor):
    a, b = of_readings(readings), of_readings([factor * reading for reading in readings])
    assert difference(a, b).value == pytest.approx(factor, rel=1e-6)


def test_bounds_that_were_kept_give_back_the_spread_they_came_from():
    readings = [90.0, 101.0, 99.0, 104.0]
    kept = mean_interval(readings)
    again = of_bounds(kept.value, kept.low, kept.high, len(readings))
    assert again.variance == pytest.approx(of_readings(readings).variance, rel=1e-3)
    assert of_bounds(100.0, None, None, 1).variance is None


def test_a_figure_read_once_has_a_ratio_and_no_bounds():
    found = difference(of_one(4.0), of_one(5.0))
    assert (found.value, found.low, found.high) == (1.25, None, None)


def test_shares_differ_by_points_and_may_be_zero():
    rng = np.random.default_rng(3)
    a, b = (
        of_steps([wait + 0.001 * rng.random() for _ in range(40)], [1.0] * 40, scale="linear") for wait in (0.0, 0.1)
    )
    found = difference(a, b)
    assert found.value == pytest.approx(0.1, abs=0.002)
    assert found.low is not None and found.low > 0.09
    assert difference(of_one(0.0, scale="linear"), of_one(0.0, scale="linear")).value == 0


def test_figures_on_different_scales_are_a_bug():
    with pytest.raises(ValueError, match="scale"):
        difference(of_one(1.0), of_one(1.0, scale="linear"))


def test_losses_of_the_same_steps_differ_by_what_they_do_not_share():
    rng = np.random.default_rng(4)
    shared = [5 * math.exp(-step / 50) + 3 + 0.2 * rng.normal() for step in range(100)]  # the batches are the same
    b = [1.02 * loss * math.exp(0.002 * rng.normal()) for loss in shared]
    found = paired_difference(shared, b)
    assert found.value == pytest.approx(1.02, abs=0.001)
    assert found.low is not None and found.high is not None
    assert 1.015 < found.low < found.high < 1.025


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (1e6, 1.960)])
def test_students_quantiles_are_those_of_any_table(freedom, quantile):
    assert t_95(freedom) == pytest.approx(quantile, abs=1e-3)


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_more_degrees_of_freedom_never_widen(first, second):
    low, high = sorted([first, second])
    assert t_95(high) <= t_95(low) + 1e-6


def test_predicted_bounds_give_back_the_spread_of_a_normal_distribution():
    found = of_interval(100.0, 100 * math.exp(-0.02326), 100 * math.exp(0.02326), 0.98)
    assert found.variance == pytest.approx(0.01**2, rel=1e-3)
    interval = found.interval
    assert interval.low is not None and interval.high is not None
    assert math.log(interval.high / interval.low) == pytest.approx(2 * 0.0196, rel=1e-3)


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.0, 1.0)])
def test_bounds_that_say_nothing_are_no_spread(low, high):
    assert of_interval(1.0, low, high, 0.98).variance is None


@given(st.lists(st.tuples(rates, st.floats(1e-3, 1e3)), min_size=1, max_size=30), st.integers(0, 3))
def test_figures_that_are_none_are_left_out(pairs, odd):
    broken = [(math.nan, 1.0), (math.inf, 1.0), (1.0, 0.0), (-1.0, 1.0)][: odd + 1]
    mixed = [*broken, *pairs]
    found, clean = of_sound_steps(mixed), of_steps(*zip(*pairs, strict=True))
    assert found == clean
    assert of_sound_steps(broken) is None
