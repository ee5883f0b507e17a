"""Bounds of the smallest micro-batch size within 2 % of the best throughput."""

import pytest

from autotune.evidence.probe import CurvePoint
from autotune.profiles.decide.knee import knee_interval

WITHOUT_BOUNDS = [
    CurvePoint(size=size, units_per_s=rate, step_s=1.0, timed_steps=4)
    for size, rate in ((1, 50.0), (2, 100.0))
]
"""Curve of steps that show no spread."""


def noisy_curve(bounds: dict[int, tuple[float, float]]) -> list[CurvePoint]:
    """Return the curve with these bounds of rates by micro-batch size."""
    return [
        CurvePoint(
            size=size,
            units_per_s=(low * high) ** 0.5,
            units_per_s_low=low,
            units_per_s_high=high,
            step_s=1.0,
            timed_steps=4,
        )
        for size, (low, high) in bounds.items()
    ]


def test_knee_is_between_bounds_if_noise_hides_it():
    # The best is 8. Size 2 may be within 2 % of it, as 99 exceeds 98 % of 99; size 4 is
    # not for certain, as 97 is below 98 % of 100.
    curve = noisy_curve({1: (40, 60), 2: (90, 99), 4: (97, 101), 8: (99, 100)})
    assert knee_interval(curve) == (2, 8)


def test_knee_is_one_size_if_noise_is_small():
    curve = noisy_curve({1: (50, 51), 2: (99.5, 99.9), 4: (100, 100.4)})
    assert knee_interval(curve) == (2, 2)


@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(WITHOUT_BOUNDS, id="no spread"),
        pytest.param([], id="no points"),
    ],
)
def test_knee_is_unknown_without_bounds_of_rates(curve):
    assert knee_interval(curve) is None
