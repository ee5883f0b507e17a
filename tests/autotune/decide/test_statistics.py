import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.statistics import mean_interval, normal_quantile, t_quantile, trimmed_interval

figures = st.lists(st.floats(0.1, 1e6), min_size=2, max_size=20)
confidences = st.floats(0.5, 0.999)


@given(figures)
def test_the_mean_lies_within_its_bounds_and_among_its_figures(values):
    found = mean_interval(values)
    assert found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9)
    assert min(values) * (1 - 1e-9) <= found.value <= max(values) * (1 + 1e-9)


@given(figures, st.floats(0.5, 2))
def test_the_mean_scales_with_its_figures(values, factor):
    plain, scaled = mean_interval(values), mean_interval([value * factor for value in values])
    assert math.isclose(plain.value * factor, scaled.value, rel_tol=1e-9)
    assert math.isclose(plain.high * factor, scaled.high, rel_tol=1e-6)


def test_one_figure_shows_no_spread_and_none_is_refused():
    alone = mean_interval([2.0])
    assert (alone.value, alone.low, alone.high) == (pytest.approx(2.0), None, None)
    with pytest.raises(ValueError, match="no figures"):
        mean_interval([])


def test_the_interval_of_three_figures_uses_students_quantile():
    found = mean_interval([math.exp(value) for value in (0.0, 0.1, 0.2)])
    assert math.log(found.high) == pytest.approx(0.1 + 4.303 * 0.1 / math.sqrt(3))


@given(figures, st.floats(0.5, 2))
def test_the_trimmed_mean_lies_within_its_bounds_and_scales_with_its_figures(values, factor):
    plain, scaled = trimmed_interval(values), trimmed_interval([value * factor for value in values])
    assert plain.low <= plain.value * (1 + 1e-9)
    assert plain.value <= plain.high * (1 + 1e-9)
    assert math.isclose(plain.value * factor, scaled.value, rel_tol=1e-9)
    assert math.isclose(plain.low * factor, scaled.low, rel_tol=1e-6)


def test_one_reading_in_five_moves_the_mean_and_not_the_trimmed_mean():
    steady, held_up = [1.0, 1.01, 0.99, 1.02, 0.98], [1.0, 1.01, 0.99, 1.02, 0.3]
    assert trimmed_interval(held_up).value == pytest.approx(trimmed_interval(steady).value, rel=0.01)
    assert mean_interval(held_up).value < 0.85


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=4))
def test_fewer_than_five_figures_are_not_trimmed(values):
    assert trimmed_interval(values) == mean_interval(values)


@pytest.mark.parametrize(("confidence", "value"), [(0.6827, 1.0), (0.95, 1.960), (0.98, 2.326), (0.99, 2.576)])
def test_normal_quantiles_are_those_of_the_tables(confidence, value):
    assert normal_quantile(confidence) == pytest.approx(value, abs=1e-3)


# Two-sided quantiles from tables of Student's distribution.
@pytest.mark.parametrize(
    ("confidence", "freedom", "value", "tolerance"),
    [
        (0.95, 3, 3.182, 0.03),
        (0.95, 5, 2.571, 0.01),
        (0.95, 10, 2.228, 0.001),
        (0.95, 30, 2.042, 0.001),
        (0.98, 3, 4.541, 0.04),
        (0.98, 5, 3.365, 0.01),
        (0.98, 10, 2.764, 0.002),
        (0.98, 20, 2.528, 0.001),
        (0.99, 10, 3.169, 0.003),
        (0.99, 60, 2.660, 0.001),
    ],
)
def test_students_quantiles_are_those_of_the_tables(confidence, freedom, value, tolerance):
    assert t_quantile(confidence, freedom) == pytest.approx(value, rel=tolerance)


@given(confidences, st.integers(1, 200))
def test_students_quantile_falls_with_the_freedom_towards_the_normal_one(confidence, freedom):
    normal = normal_quantile(confidence)
    assert t_quantile(confidence, freedom) >= t_quantile(confidence, freedom + 1) >= normal
    assert t_quantile(confidence, 10**7) == pytest.approx(normal, abs=1e-5)


@given(confidences, st.integers(1, 200))
def test_more_confidence_asks_for_a_wider_interval(confidence, freedom):
    assert t_quantile(min(0.9995, confidence + 0.001), freedom) > t_quantile(confidence, freedom)


def test_a_distribution_without_freedom_is_refused():
    with pytest.raises(ValueError, match="0 degrees"):
        t_quantile(0.95, 0)
