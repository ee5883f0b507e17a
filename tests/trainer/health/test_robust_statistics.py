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


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_median_of_sorted_is_the_median(values):
    assert median_of_sorted(sorted(values)) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize("seed", range(5))
def test_scatter_is_robust_to_outliers(seed):
    rng = random.Random(seed)
    values = [rng.gauss(5, 2) for _ in range(2000)]
    centre, sigma = centre_and_scatter(sorted(values))
    assert centre == pytest.approx(5, abs=0.2)
    assert sigma == pytest.approx(2, rel=0.1)
    outliers = [1e9] * 600  # a quarter of all values
    centre, sigma = centre_and_scatter(sorted(values + outliers))
    assert centre < 7
    assert sigma < 4


@pytest.mark.parametrize("seed", range(5))
def test_level_follows_falling_values_only(seed):
    rng = random.Random(seed)
    falling = [10 - 0.05 * step + rng.gauss(0, 0.1) for step in range(128)]
    level, sigma = level_and_scatter(falling)
    middle_of_second_half = 96
    assert level == pytest.approx(10 - 0.05 * middle_of_second_half, abs=0.2)
    assert sigma == pytest.approx(0.1, rel=0.4)
    centre, scatter = centre_and_scatter(sorted(falling))
    assert scatter > 1
    rising = falling[::-1]
    assert level_and_scatter(rising) == (centre, scatter)


@pytest.mark.parametrize("seed", range(5))
def test_error_of_median_ignores_slope(seed):
    rng = random.Random(seed)
    blocks = [rng.gauss(0, 1) for _ in range(400)]
    _, error = median_and_error(blocks)
    # The standard error of a median of normal values with sigma 1: sqrt(pi / 2 / n).
    assert error == pytest.approx(math.sqrt(math.pi / 2 / 400), rel=0.2)
    _, sloped = median_and_error(
        [value + 0.05 * index for index, value in enumerate(blocks)]
    )
    assert sloped == pytest.approx(error, rel=0.1)


def test_median_of_one_block_has_no_error():
    assert median_and_error([2.5]) == (2.5, 0.0)
