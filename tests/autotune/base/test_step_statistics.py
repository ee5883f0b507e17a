"""Bounds of steps that depend on their neighbours are as wide as that requires."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.estimates import Estimate, change_between
from autotune.base.interval import Interval
from autotune.base.step_statistics import block_count, estimate_steps, paired_change
from tests.autotune.advice.runs import noisy

NOISE = 0.05
"""Standard deviation of simulated steps, as a share of their mean."""
rates = st.floats(1e-3, 1e9)


def _steps(seed: int, n: int, autocorrelation: float, *, mean: float = 1.0) -> Estimate:
    """Return the estimated rate of n simulated steps.

    Args:
        seed: Seed of the noise.
        n: Number of steps.
        autocorrelation: That of neighbouring steps.
        mean: Mean rate of a step.
    """
    step_rates = noisy(seed, n, autocorrelation=autocorrelation, noise=NOISE, mean=mean)
    return estimate_steps([1.0] * n, [1 / rate for rate in step_rates])


def _change_between_runs(
    seed: int, n: int, autocorrelation: float, speed: float
) -> Interval:
    """Return the change from a run of speed 1 to a run of this speed.

    Args:
        seed: Seed of the noise of both runs.
        n: Number of steps of each run.
        autocorrelation: That of neighbouring steps.
        speed: Mean rate of a step in the second run.
    """
    return change_between(
        _steps(2 * seed, n, autocorrelation),
        _steps(2 * seed + 1, n, autocorrelation, mean=speed),
    )


def _is_different(change: Interval) -> bool:
    """Return True if a change has bounds that exclude equal speeds."""
    return change.low is not None and not change.low <= 1 <= change.high


def _changes(
    comparisons: int, n: int, autocorrelation: float, *, speed: float
) -> list[Interval]:
    """Return the changes of several comparisons, each with noise of its own."""
    return [
        _change_between_runs(seed, n, autocorrelation, speed)
        for seed in range(comparisons)
    ]


@pytest.mark.parametrize("n", [40, 120, 400])
@pytest.mark.parametrize("autocorrelation", [0.0, 0.5, 0.8, 0.9])
def test_same_speed_is_seldom_found_different(n, autocorrelation):
    comparisons = 400
    changes = _changes(comparisons, n, autocorrelation, speed=1.0)
    different = sum(_is_different(change) for change in changes)
    # Bounds at 95 % exclude the truth in 5 % of comparisons. Of so many, the share is
    # higher than this by chance once in 200 times.
    chance = 2.6 * math.sqrt(0.05 * 0.95 / comparisons)
    assert different / comparisons <= 0.05 + chance


@pytest.mark.parametrize(
    ("n", "autocorrelation"),
    # The more steps depend on their neighbours, the more of them are needed.
    [(60, 0.0), (200, 0.5), (600, 0.8), (2000, 0.9)],
)
def test_finds_five_percent_with_enough_steps(n, autocorrelation):
    comparisons = 100
    changes = _changes(comparisons, n, autocorrelation, speed=0.95)
    different = sum(_is_different(change) for change in changes)
    without_bounds = sum(change.low is None for change in changes)
    # The numbers of steps are chosen so that the change is found nearly always.
    assert different / comparisons >= 0.85
    assert without_bounds / comparisons <= 0.05


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
    # So slow a variation needs hundreds of steps for a block.
    estimate = _steps(seed=2, n=40, autocorrelation=0.97)
    assert estimate.variance is None
    assert estimate.reason_without_variance == "too few steps for how slowly they vary"
    assert estimate.interval() == Interval(value=estimate.value)


def test_shares_differ_by_points():
    rng = np.random.default_rng(3)

    def share_of_waits(wait_s):
        """Return the share of waits in 40 steps of a second, with 1 ms of noise."""
        waits_s = [wait_s + 0.001 * rng.random() for _ in range(40)]
        return estimate_steps(waits_s, [1.0] * 40, scale="linear")

    without = share_of_waits(0.0)
    with_waits = share_of_waits(0.1)
    change = change_between(without, with_waits)
    # The noise of both sides is within 0.001, and the bounds are hardly wider.
    assert change.value == pytest.approx(0.1, abs=0.001)
    assert change.low is not None
    assert change.low > 0.09


def test_losses_of_same_steps_differ_by_unshared_part():
    rng = np.random.default_rng(3)
    # Noise of 0.2 nats that both runs share, as they read the same data, and of 0.2 %
    # that they do not share.
    losses = [5 * math.exp(-step / 50) + 3 + 0.2 * rng.normal() for step in range(100)]
    others = [1.02 * loss * math.exp(0.002 * rng.normal()) for loss in losses]
    change = paired_change(losses, others)
    # The shared noise alone would make bounds of 1 % of the loss and more.
    assert change.value == pytest.approx(1.02, abs=0.001)
    assert 1.015 < change.low < change.high < 1.025
