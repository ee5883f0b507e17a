"""A figure with its uncertainty, and the comparison of two such figures. Pure.

``window_statistics`` and ``step_statistics`` make estimates from measurements. Two
independent ones are compared by Welch's t (Biometrika 34, 1947).
"""

import math
from dataclasses import dataclass
from typing import Literal

from autotune.base.interval import CONFIDENCE, SHOWN_CONFIDENCE, Interval
from autotune.base.student_t import t_quantile

Scale = Literal["log", "linear"]
"""Scale of comparison: rates and sizes by their ratio, so by logarithms; shares by
their difference."""

MAX_HALF_WIDTH = math.log(1.5)
"""Largest useful half-width of bounds, 50 % of the value. Bounds of a ratio may be
twice as wide, by logarithms, if they tell which of two figures is higher."""
TOO_NOISY = "too noisy for so few measurements"
"""Reason for missing bounds if both figures have a spread."""
_MAX_EXPONENT = 700.0
"""Largest argument of the exponential function that does not overflow a float, with
some margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with the variance and degrees of freedom from which its bounds follow.

    On the ``log`` scale, they are those of its logarithm.
    """

    value: float
    n: int
    """Number of measurements."""
    scale: Scale = "log"
    variance: float | None = None
    """Variance of the figure on its scale; None if the measurements show no spread that
    can be trusted."""
    freedom: float = 0.0
    """Degrees of freedom of the variance."""
    no_spread: str = "one figure shows no spread"
    """Reason why there is no variance."""

    @property
    def center(self) -> float:
        """The figure on its scale."""
        return log_or_minus_infinity(self.value) if self.scale == "log" else self.value

    def interval(self, confidence: float = SHOWN_CONFIDENCE) -> Interval:
        """Return the figure with its bounds, or alone if they are too wide to use."""
        interval = self.ratio(confidence)
        if interval.high is None or self.scale == "linear":
            return interval
        if log_or_minus_infinity(interval.high) - self.center > MAX_HALF_WIDTH:
            return Interval(value=self.value)
        return interval

    def ratio(self, confidence: float = CONFIDENCE) -> Interval:
        """Return a ratio, or a difference of shares, with its bounds.

        A ratio whose bounds are neither narrow nor clear is returned without them.
        """
        if self.variance is None:
            return Interval(value=self.value)
        half_width = t_quantile(confidence, self.freedom) * math.sqrt(self.variance)
        low = self.center - half_width
        high = self.center + half_width
        if self.scale == "linear":
            return Interval(value=self.value, low=low, high=high, confidence=confidence)
        is_wide = half_width > MAX_HALF_WIDTH
        is_very_wide = half_width > 2 * MAX_HALF_WIDTH
        is_undecided = low <= 0 <= high
        if is_very_wide or (is_wide and is_undecided):
            return Interval(value=self.value)
        return Interval(
            value=self.value,
            low=exp_without_overflow(low),
            high=exp_without_overflow(high),
            confidence=confidence,
        )


def estimate_single(value: float, *, scale: Scale = "log") -> Estimate:
    """Return a figure that was measured once."""
    return Estimate(value=value, n=1, scale=scale)


def difference(a: Estimate, b: Estimate) -> Interval:
    """Return B over A, or for shares B - A, with 95 % bounds by Welch's t.

    Raises:
        ValueError: If the scales differ.
    """
    if a.scale != b.scale:
        raise ValueError(
            f"a figure on the {a.scale} scale and one on the {b.scale} scale"
        )
    center = b.center - a.center
    value = exp_without_overflow(center) if a.scale == "log" else center
    if a.variance is None or b.variance is None:
        return Interval(value=value)
    variance = a.variance + b.variance
    # Degrees of freedom by Welch and Satterthwaite: the figure with the larger share of
    # the variance decides. If neither varies, any share will do.
    share_of_a = a.variance / variance if variance > 0 else 1.0
    freedom = 1 / (share_of_a**2 / a.freedom + (1 - share_of_a) ** 2 / b.freedom)
    estimate = Estimate(
        value=value,
        n=min(a.n, b.n),
        scale=a.scale,
        variance=variance,
        freedom=max(1.0, freedom),
    )
    return estimate.ratio(SHOWN_CONFIDENCE)


def reason_without_bounds(*estimates: Estimate) -> str:
    """Return the reason why a comparison of these estimates has no bounds."""
    # A dictionary, to name each reason once and in order.
    reasons = dict.fromkeys(
        estimate.no_spread for estimate in estimates if estimate.variance is None
    )
    if not reasons:
        return TOO_NOISY
    return "; ".join(reasons)


def exp_without_overflow(value: float) -> float:
    """Return the exponential of a value, or the largest one that is surely a float."""
    return math.exp(min(_MAX_EXPONENT, value))


def log_or_minus_infinity(value: float) -> float:
    """Return the logarithm of a value; minus infinity unless the value is positive."""
    return math.log(value) if value > 0 else -math.inf
