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
    """Return the 20 % trimmed mean of at least one value."""
    trimmed_count = _trimmed_count(len(values))
    kept = sorted(values)[trimmed_count : len(values) - trimmed_count]
    return statistics.fmean(kept)


def _trimmed_count(value_count: int) -> int:
    """Return the number of values to leave out at each end."""
    return int(TRIMMED_SHARE * value_count)


def scaled_residuals(values: Sequence[float]) -> list[float]:
    """Return the deviations of values from their trimmed mean.

    The deviations of n values are scaled by the square root of n / (n - 1), so that
    their population variance is the sample variance of the values. Residuals of several
    figures may then be put together.

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
        residuals: ``scaled_residuals`` of the values on that scale, and of other
            figures with the same noise; None takes those of the values alone.

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
    residual_count = len(residuals)
    if residual_count < MIN_WINDOWS:
        return Estimate(
            value=value, n=n, scale=scale, reason_without_variance=NOT_ENOUGH
        )
    # Winsorise the spread only if the mean was trimmed: too few values to trim stay too
    # few, however many residuals of other figures there are.
    trimmed_residuals = 0
    if _trimmed_count(n) > 0:
        trimmed_residuals = _trimmed_count(residual_count)
    kept_count = residual_count - 2 * trimmed_residuals
    spread = statistics.pvariance(_winsorised(residuals, trimmed_residuals))
    # Yuen's variance of the trimmed mean of as many values as there are residuals. The
    # mean is one of only n values, so its variance is larger by the ratio of both.
    variance = (
        spread
        * (residual_count - 1)
        / (kept_count * (kept_count - 1))
        * residual_count
        / n
    )
    return Estimate(
        value=value,
        n=n,
        scale=scale,
        variance=variance,
        degrees_of_freedom=kept_count - 1,
    )


def predict_window(
    values: Sequence[float], *, residuals: Sequence[float] | None = None
) -> Estimate:
    """Return the estimate for one further measurement, on the ``log`` scale.

    Its bounds are those of a prediction: a further measurement varies as the measured
    ones do, in addition to the uncertainty of their mean.

    Args:
        values: As for ``estimate_windows``.
        residuals: As for ``estimate_windows``.
    """
    estimate = estimate_windows(values, residuals=residuals)
    if estimate.variance is None:
        return estimate
    return replace(estimate, variance=(len(values) + 1) * estimate.variance)


def _winsorised(values: Sequence[float], trimmed_count: int) -> list[float]:
    """Return the values in order, the outermost replaced by the nearest other one.

    Args:
        values: More than twice ``trimmed_count`` values.
        trimmed_count: Number of values to replace at each end.
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
    """Return the ratio of two figures that were measured in the same rounds.

    Args:
        pairs: Both figures of each round; the ratio is that of the first to the second.
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
    """Return the estimate on the ``log`` scale that has these bounds.

    Without bounds, it has no variance.

    Args:
        interval: The figure with its bounds.
        n: Number of windows, for Student's t; None for a prediction, whose bounds are
            those of a normal distribution.
    """
    if n is None:
        measurements = 1
        degrees_of_freedom = NORMAL_DEGREES_OF_FREEDOM
        reason_without_variance = "its prediction shows no spread"
    else:
        measurements = n
        degrees_of_freedom = max(1, n - 2 * _trimmed_count(n) - 1)
        reason_without_variance = NOT_ENOUGH
    low, high, confidence = interval.low, interval.high, interval.confidence
    if low is None or high is None or confidence is None or low <= 0:
        return Estimate(
            value=interval.value,
            n=measurements,
            reason_without_variance=reason_without_variance,
        )
    # The inverse of ``Estimate.interval`` on the ``log`` scale.
    half_width = math.log(high / low) / 2
    variance = (half_width / t_quantile(confidence, degrees_of_freedom)) ** 2
    return Estimate(
        value=interval.value,
        n=measurements,
        variance=variance,
        degrees_of_freedom=degrees_of_freedom,
    )
