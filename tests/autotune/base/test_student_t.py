"""Quantiles of Student's t match published tables."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.student_t import t_quantile

confidences = st.floats(0.5, 0.999)

# Two-sided quantiles at 90, 95, 98 and 99 %, by degrees of freedom, as tables of
# Student's distribution print them: NIST/SEMATECH e-Handbook of Statistical Methods,
# 1.3.6.7.2.
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


@pytest.mark.parametrize(("degrees_of_freedom", "expected"), TABLE.items())
def test_students_quantiles_match_table(degrees_of_freedom, expected):
    quantiles = [
        t_quantile(confidence, degrees_of_freedom)
        for confidence in (0.90, 0.95, 0.98, 0.99)
    ]
    # The table has three decimals.
    assert quantiles == pytest.approx(expected, abs=0.00051)


@given(confidences, st.floats(1, 200))
def test_students_quantile_falls_towards_normal_one(confidence, degrees_of_freedom):
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    quantile = t_quantile(confidence, degrees_of_freedom)
    assert quantile >= t_quantile(confidence, degrees_of_freedom + 1) >= normal
    assert t_quantile(confidence, 10**7) == pytest.approx(normal, abs=1e-5)


def test_rejects_less_than_one_degree_of_freedom():
    with pytest.raises(ValueError, match="0 degrees"):
        t_quantile(0.95, 0)
