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


def median_error(sigma, values):
    """Return the standard error of the median of normal values."""
    return sigma * math.sqrt(math.pi / 2 / values)


def mad_relative_error(values):
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
    """2,000 normal values with a mean of 5 and a sigma of 2."""
    rng = random.Random(request.param)
    return [rng.gauss(5, 2) for _ in range(2000)]


def test_scatter_of_normal_values_is_sigma(normal_values):
    centre, sigma = centre_and_scatter(sorted(normal_values))
    assert centre == pytest.approx(5, abs=4 * median_error(2, 2000))
    assert sigma == pytest.approx(2, rel=4 * mad_relative_error(2000))


def test_scatter_is_robust_to_outliers(normal_values):
    outliers = [1e9] * 600  # nearly a quarter of all values
    centre, sigma = centre_and_scatter(sorted(normal_values + outliers))
    # With 23 % of outliers above, the median is the 65 % quantile of the others, at
    # 5 + 0.39 sigma, and their deviations grow alike.
    assert centre < 7
    assert sigma < 4


FALL_PER_STEP = 0.05
NOISE = 0.1


@pytest.fixture(params=SEEDS)
def falling_values(request):
    """128 values that fall from 10 to 3.6, with noise."""
    rng = random.Random(request.param)
    return [10 - FALL_PER_STEP * step + rng.gauss(0, NOISE) for step in range(128)]


def test_level_follows_falling_values(falling_values):
    level, _ = level_and_scatter(falling_values)
    middle_of_second_half = 96
    expected = 10 - FALL_PER_STEP * middle_of_second_half
    # A median of falling values is the mean of two in the middle, with their noise.
    assert level == pytest.approx(expected, abs=2 * NOISE)


def test_scatter_leaves_out_the_fall(falling_values):
    _, scatter = level_and_scatter(falling_values)
    assert scatter == pytest.approx(NOISE, rel=4 * mad_relative_error(128))
    _, scatter_with_fall = centre_and_scatter(sorted(falling_values))
    assert scatter_with_fall > 10 * NOISE


def test_level_of_rising_values_is_their_centre(falling_values):
    rising_values = falling_values[::-1]
    expected = centre_and_scatter(sorted(rising_values))
    assert level_and_scatter(rising_values) == expected


@pytest.fixture(params=SEEDS)
def blocks(request):
    """400 normal values with a sigma of 1."""
    rng = random.Random(request.param)
    return [rng.gauss(0, 1) for _ in range(400)]


def test_error_of_median_is_that_of_normal_values(blocks):
    _, error = median_and_error(blocks)
    # Differences of neighbours share a value with the next, so they tell less than as
    # many independent ones.
    assert error == pytest.approx(median_error(1, 400), rel=0.2)


def test_error_of_median_ignores_slope(blocks):
    _, error = median_and_error(blocks)
    sloped_blocks = [value + 0.05 * index for index, value in enumerate(blocks)]
    _, error_with_slope = median_and_error(sloped_blocks)
    # With the slope, the blocks spread over 20 sigma.
    assert error_with_slope == pytest.approx(error, rel=0.1)


def test_median_of_one_block_has_no_error():
    assert median_and_error([2.5]) == (2.5, 0.0)
