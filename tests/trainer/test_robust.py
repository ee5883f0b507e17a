import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.plateau import centre_and_scatter, level_and_scatter, median_and_error, middle

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(NUMBERS)
def test_the_middle_is_the_median(values):
    assert middle(sorted(values)) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize("seed", range(5))
def test_scatter_is_the_standard_deviation_of_normal_values_whatever_a_third_of_them_is(seed):
    rng = random.Random(seed)
    values = [rng.gauss(5, 2) for _ in range(2000)]
    centre, sigma = centre_and_scatter(sorted(values))
    assert centre == pytest.approx(5, abs=0.2)
    assert sigma == pytest.approx(2, rel=0.1)
    centre, sigma = centre_and_scatter(sorted(values + [1e9] * 600))
    assert centre < 7
    assert sigma < 4


@pytest.mark.parametrize("seed", range(5))
def test_what_falls_is_where_it_is_now_and_scatters_around_its_way(seed):
    rng = random.Random(seed)
    falling = [10 - 0.05 * step + rng.gauss(0, 0.1) for step in range(128)]
    level, sigma = level_and_scatter(falling)
    assert level == pytest.approx(10 - 0.05 * 96, abs=0.2)
    assert sigma == pytest.approx(0.1, rel=0.4)
    assert centre_and_scatter(sorted(falling))[1] > 1


def test_what_rises_is_held_against_all_of_it():
    rising = [1 + 0.05 * step for step in range(128)]
    assert level_and_scatter(rising) == centre_and_scatter(rising)


@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_a_median_is_that_of_repeated_draws_and_a_slope_adds_nothing(seed):
    rng = random.Random(seed)
    blocks = [rng.gauss(0, 1) for _ in range(400)]
    _, error = median_and_error(blocks)
    assert error == pytest.approx(1.2533 / math.sqrt(400), rel=0.2)
    _, sloped = median_and_error([value + 0.05 * place for place, value in enumerate(blocks)])
    assert sloped == pytest.approx(error, rel=0.1)


def test_one_block_has_no_error_that_could_be_told():
    assert median_and_error([2.5]) == (2.5, 0.0)
