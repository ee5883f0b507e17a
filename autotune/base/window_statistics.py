"""Statistics of independent measurements, such as the timed windows of rounds. Pure.

A figure is the 20 % trimmed mean of its windows, which one disturbed window in five
does not move, with Student's t on the winsorised spread (Yuen, Biometrika 61, 1974;
Wilcox, Introduction to Robust Estimation, 3rd ed., ch. 4). Fewer than 5 windows are not
trimmed, and fewer than 3 have no bounds.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from autotune.base.estimates import Estimate, Scale, exp_without_overflow
from autotune.base.interval import CONFIDENCE, NOT_ENOUGH, Interval
from autotune.base.student_t import NORMAL_DEGREES_OF_FREEDOM, t_quantile

TRIMMED_SHARE = 0.2
"""Share of the values that a trimmed mean leaves out at each end."""
MIN_WINDOWS = 3
"""Fewest windows that show a useful spread."""


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the 20 % trimmed mean."""
    trimmed_count = _trimmed_count(len(values))
    kept = sorted(values)[trimmed_count : len(values) - trimmed_count]
    return statistics.fmean(kept)


def _trimmed_count(n: int) -> int:
    """Return how many of ``n`` values are left out at each end."""
    return int(TRIMMED_SHARE * n)


def scaled_residuals(values: Sequence[float]) -> list[float]:
    """Return the deviations of values from their trimmed mean.

    They are scaled by the square root of n / (n - 1), so that their population variance
    is the sample variance of the values: residuals of several figures may be put
    together then.

    Returns:
        The deviations, or an empty list for fewer than two values.
    """
    n = len(values)
    if n < 2:
        return []
    center = trimmed_mean(values)
    factor = math.sqrt(n / (n - 1))
    return [factor * (value - center) for value in values]


def estimate_windows(
    values: Sequence[float],
    *,
    scale: Scale = "log",
    residuals: Sequence[float] | None = None,
) -> Estimate:
    """Return the trimmed mean of independent measurements.

    Args:
        values: Rates of windows, or ratios within rounds.
        scale: Scale of comparison.
        residuals: ``scaled_residuals`` on that scale, by default those of the values.
            Those of other figures with the same noise may be added.

    Raises:
        ValueError: If there are no values.
    """
    if not values:
        raise ValueError("no figures")
    points = [math.log(value) for value in values] if scale == "log" else values
    center = trimmed_mean(points)
    n = len(points)
    value = exp_without_overflow(center) if scale == "log" else center

    if residuals is None:
        residuals = scaled_residuals(points)
    m = len(residuals)  # n, unless those of other figures are added
    if m < MIN_WINDOWS:
        return Estimate(
            value=value, n=n, scale=scale, reason_without_variance=NOT_ENOUGH
        )
    # The spread must be winsorised exactly if the mean is trimmed, even if added
    # residuals are enough for it.
    trimmed_count = _trimmed_count(m) if _trimmed_count(n) > 0 else 0
    kept_count = m - 2 * trimmed_count
    # Yuen's variance of a mean of m values, times m / n as the mean is one of n; the
    # factor (m - 1) / m takes back the scale of the residuals.
    spread = statistics.pvariance(_winsorised(residuals, trimmed_count))
    variance = spread * (m - 1) / (kept_count * (kept_count - 1)) * m / n
    return Estimate(
        value=value,
        n=n,
        scale=scale,
        variance=variance,
        degrees_of_freedom=kept_count - 1,
    )


def _winsorised(values: Sequence[float], trimmed_count: int) -> list[float]:
    """Return the values with the lowest and highest replaced by the nearest kept one.

    ``trimmed_count`` values are replaced at each end.
    """
    in_order = sorted(values)
    lowest = in_order[trimmed_count]
    highest = in_order[len(in_order) - trimmed_count - 1]
    return [min(max(value, lowest), highest) for value in in_order]


def paired_ratio(
    pairs: Sequence[tuple[float, float]],
    *,
    confidence: float = CONFIDENCE,
    candidates: int = 1,
) -> Interval:
    """Return the ratio of the first to the second of figures of the same rounds.

    Args:
        pairs: Two figures of each round.
        confidence: Confidence of the bounds.
        candidates: Number of ratios of which this one may have been picked as the
            highest. Its bounds are widened until all ratios lie within theirs with the
            same confidence (Bonferroni).

    Raises:
        ValueError: If there are no figures.
    """
    estimate = estimate_windows([first / second for first, second in pairs])
    interval = estimate.interval_of_comparison(1 - (1 - confidence) / candidates)
    return replace(interval, confidence=None if interval.low is None else confidence)


def estimate_from_bounds(interval: Interval, n: int | None = None) -> Estimate:
    """Return the estimate that has these bounds.

    Args:
        interval: The figure with its bounds.
        n: Number of windows, for Student's t; None for a prediction, whose bounds are
            those of a normal distribution.
    """
    measurements = n if n else 1
    low, high, confidence = interval.low, interval.high, interval.confidence
    if low is None or high is None or confidence is None or low <= 0:
        return Estimate(
            value=interval.value,
            n=measurements,
            reason_without_variance=NOT_ENOUGH
            if n
            else "its prediction shows no spread",
        )
    degrees_of_freedom = NORMAL_DEGREES_OF_FREEDOM
    if n is not None:
        degrees_of_freedom = max(1, n - 2 * _trimmed_count(n) - 1)
    half_width = math.log(high / low) / 2
    variance = (half_width / t_quantile(confidence, degrees_of_freedom)) ** 2
    return Estimate(
        value=interval.value,
        n=measurements,
        variance=variance,
        degrees_of_freedom=degrees_of_freedom,
    )
