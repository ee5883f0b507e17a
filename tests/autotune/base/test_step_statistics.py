"""Steps that depend on their neighbours have bounds that say so."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.estimates import Estimate, difference
from autotune.base.interval import Interval
from autotune.base.step_statistics import block_count, estimate_steps, paired_difference
from tests.autotune.advice.runs import noisy

NOISE = 0.05
"""Standard deviation of simulated steps, as a share of their mean."""
rates = st.floats(1e-3, 1e9)


def _steps(seed: int, n: int, autocorrelation: float, *, mean: float = 1.0) -> Estimate:
    """Return the rate of steps that depend on their neighbours."""
    step_rates = noisy(seed, n, autocorrelation=autocorrelation, noise=NOISE, mean=mean)
    return estimate_steps([1.0] * n, [1 / rate for rate in step_rates])


def _difference_of_runs(
    seed: int, n: int, autocorrelation: float, ratio: float
) -> Interval:
    """Return the difference of two runs, of which the second has this speed."""
    return difference(
        _steps(2 * seed, n, autocorrelation),
        _steps(2 * seed + 1, n, autocorrelation, mean=ratio),
    )


def _is_different(change: Interval) -> bool:
    return change.low is not None and not change.low <= 1 <= change.high


@pytest.mark.parametrize(
    ("n", "autocorrelation"),
    list(itertools.product((40, 120, 400), (0.0, 0.5, 0.8, 0.9))),
)
def test_same_speed_is_seldom_found_different(n, autocorrelation):
    runs = 400
    changes = [
        _difference_of_runs(seed, n, autocorrelation, 1.0) for seed in range(runs)
    ]
    different = sum(_is_different(change) for change in changes)
    # A share of 5 % of so many runs is higher by chance once in 200 times.
    chance = 2.6 * math.sqrt(0.05 * 0.95 / runs)
    assert different / runs <= 0.05 + chance


@pytest.mark.parametrize(
    ("n", "autocorrelation"), [(60, 0.0), (200, 0.5), (600, 0.8), (2000, 0.9)]
)
def test_finds_five_percent_with_enough_steps(n, autocorrelation):
    runs = 100
    changes = [
        _difference_of_runs(seed, n, autocorrelation, 0.95) for seed in range(runs)
    ]
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


def test_losses_of_same_steps_differ_by_unshared_part():
    rng = np.random.default_rng(3)
    losses = [5 * math.exp(-step / 50) + 3 + 0.2 * rng.normal() for step in range(100)]
    others = [1.02 * loss * math.exp(0.002 * rng.normal()) for loss in losses]
    change = paired_difference(losses, others)
    assert change.value == pytest.approx(1.02, abs=0.001)
    assert 1.015 < change.low < change.high < 1.025
