"""Medians, robust standard deviations and their errors, of normal values."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.health.robust_statistics import (
    centre_and_scatter,
    level_and_scatter,
    median_and_error,
    median_of_sorted,
)

SEEDS = range(5)
MEAN = 5.0
SIGMA = 2.0
VALUES = 2000
"""Number of normal values, with that mean and sigma."""
FIRST_VALUE = 10.0
FALL_PER_STEP = 0.05
NOISE = 0.1
FALLING_VALUES = 128
"""Number of values that fall with noise, from 10 to 3.6."""
BLOCKS = 400
"""Number of blocks, which are normal values with a sigma of 1."""
STANDARD_ERRORS = 4
"""Standard errors by which an estimate may be off: by chance once in 16,000 times."""


def median_error(*, sigma, values):
    """Return the standard error of the median of so many normal values."""
    return sigma * math.sqrt(math.pi / 2 / values)


def mad_relative_error(*, values):
    """Return the relative standard error of sigma, estimated from the MAD.

    For normal values its efficiency is 37 % of the standard deviation, whose relative
    error is sqrt(1 / 2 n) (Rousseeuw and Croux 1993).
    """
    return math.sqrt(1 / (2 * 0.37 * values))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_median_of_sorted_is_the_median(values):
    assert median_of_sorted(sorted(values)) == pytest.approx(statistics.median(values))


@pytest.fixture(params=SEEDS)
def normal_values(request):
    rng = random.Random(request.param)
    return [rng.gauss(MEAN, SIGMA) for _ in range(VALUES)]


def test_scatter_of_normal_values_is_sigma(normal_values):
    centre, sigma = centre_and_scatter(sorted(normal_values))
    centre_error = median_error(sigma=SIGMA, values=VALUES)
    assert centre == pytest.approx(MEAN, abs=STANDARD_ERRORS * centre_error)
    sigma_error = mad_relative_error(values=VALUES)
    assert sigma == pytest.approx(SIGMA, rel=STANDARD_ERRORS * sigma_error)


def test_scatter_is_robust_to_outliers(normal_values):
    outliers = [1e9] * 600  # nearly a quarter of all values
    centre, sigma = centre_and_scatter(sorted(normal_values + outliers))
    # With 23 % of outliers above, the median is the 65 % quantile of the others, 0.39
    # sigma above their mean, and their deviations grow alike.
    assert centre < MEAN + SIGMA
    assert sigma < 2 * SIGMA


@pytest.fixture(params=SEEDS)
def falling_values(request):
    rng = random.Random(request.param)
    return [
        FIRST_VALUE - FALL_PER_STEP * step + rng.gauss(0, NOISE)
        for step in range(FALLING_VALUES)
    ]


def test_level_follows_falling_values(falling_values):
    level, _ = level_and_scatter(falling_values)
    middle_of_second_half = 0.75 * FALLING_VALUES
    expected = FIRST_VALUE - FALL_PER_STEP * middle_of_second_half
    # A median of falling values is the mean of two in the middle, with their noise.
    assert level == pytest.approx(expected, abs=2 * NOISE)


def test_scatter_leaves_out_the_fall(falling_values):
    _, scatter = level_and_scatter(falling_values)
    scatter_error = mad_relative_error(values=FALLING_VALUES)
    assert scatter == pytest.approx(NOISE, rel=STANDARD_ERRORS * scatter_error)
    _, scatter_with_fall = centre_and_scatter(sorted(falling_values))
    assert scatter_with_fall > 10 * NOISE


def test_level_of_rising_values_is_their_centre(falling_values):
    rising_values = falling_values[::-1]
    expected = centre_and_scatter(sorted(rising_values))
    assert level_and_scatter(rising_values) == expected


@pytest.fixture(params=SEEDS)
def blocks(request):
    rng = random.Random(request.param)
    return [rng.gauss(0, 1) for _ in range(BLOCKS)]


def test_error_of_median_is_that_of_normal_values(blocks):
    _, error = median_and_error(blocks)
    # A MAD of so many independent differences has a relative error of 6 %. Each shares
    # a value with the next, which makes it 7 %, as a simulation shows. The tolerance is
    # three of these errors.
    expected = median_error(sigma=1, values=BLOCKS)
    assert error == pytest.approx(expected, rel=0.2)


def test_error_of_median_ignores_slope(blocks):
    _, error = median_and_error(blocks)
    sloped_blocks = [value + 0.05 * index for index, value in enumerate(blocks)]
    _, error_with_slope = median_and_error(sloped_blocks)
    # With the slope, the blocks spread over 20 sigma, but neighbours differ by 0.05
    # sigma more: a 28th of the scatter of their difference.
    assert error_with_slope == pytest.approx(error, rel=0.1)


def test_median_of_one_block_has_no_error():
    assert median_and_error([2.5]) == (2.5, 0.0)
