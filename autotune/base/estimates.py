"""A figure with its uncertainty, and the change from one such figure to another. Pure.

``window_statistics`` and ``step_statistics`` make estimates from measurements. Two
independent estimates are compared by Welch's t (Biometrika 34, 1947).
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
"""Largest useful half-width of bounds on the ``log`` scale, a factor of 1.5. Bounds of
a ratio may be twice as wide if they tell which of two figures is higher."""
TOO_NOISY = "too noisy for so few measurements"
"""Reason for missing bounds if both figures have a spread."""
_MAX_EXPONENT = 700.0
"""Argument of the exponential function that surely does not overflow a float, which
happens above 709."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with the variance and degrees of freedom from which its bounds follow.

    The figure is a rate, a share, or a comparison of two: a ratio, or a difference of
    shares. On the ``log`` scale, the variance is that of its logarithm.
    """

    value: float
    """The figure itself, not its logarithm."""
    n: int
    """Number of measurements."""
    scale: Scale = "log"
    """Scale on which the figure is compared with others."""
    variance: float | None = None
    """Variance of the figure on its scale; None if the measurements show no spread that
    can be trusted."""
    degrees_of_freedom: float = 0.0
    """Degrees of freedom of the variance, at least 1; not used without a variance."""
    reason_without_variance: str = "one figure shows no spread"
    """Reason why there is no variance, for people; not used if there is one."""

    def __post_init__(self) -> None:
        if self.variance is not None and self.degrees_of_freedom < 1:
            raise ValueError(
                f"a variance with {self.degrees_of_freedom:g} degrees of freedom"
            )

    @property
    def center(self) -> float:
        """The figure on its scale."""
        return log_or_minus_infinity(self.value) if self.scale == "log" else self.value

    def interval(self, confidence: float = SHOWN_CONFIDENCE) -> Interval:
        """Return the figure with its bounds, or alone if they are too wide to use."""
        half_width = self._half_width(confidence)
        if half_width is None:
            return Interval(value=self.value)
        if self.scale == "log" and half_width > MAX_HALF_WIDTH:
            return Interval(value=self.value)
        return self._bounded(half_width, confidence)

    def interval_of_comparison(self, confidence: float = CONFIDENCE) -> Interval:
        """Return a figure that compares two others, with its bounds.

        If the bounds of a ratio exclude 1, they tell which of the two figures is
        higher. Such bounds may be twice as wide as those of ``interval``.
        """
        half_width = self._half_width(confidence)
        if half_width is None:
            return Interval(value=self.value)
        if self.scale == "log":
            is_undecided = self.center - half_width <= 0 <= self.center + half_width
            limit = MAX_HALF_WIDTH if is_undecided else 2 * MAX_HALF_WIDTH
            if half_width > limit:
                return Interval(value=self.value)
        return self._bounded(half_width, confidence)

    def _half_width(self, confidence: float) -> float | None:
        """Return half the width of the bounds on the scale; None without a variance."""
        if self.variance is None:
            return None
        quantile = t_quantile(confidence, self.degrees_of_freedom)
        return quantile * math.sqrt(self.variance)

    def _bounded(self, half_width: float, confidence: float) -> Interval:
        """Return the figure with bounds at this distance on the scale."""
        low = self.center - half_width
        high = self.center + half_width
        if self.scale == "log":
            low = exp_without_overflow(low)
            high = exp_without_overflow(high)
        return Interval(value=self.value, low=low, high=high, confidence=confidence)


def estimate_single(value: float, *, scale: Scale = "log") -> Estimate:
    """Return a figure that was measured once."""
    return Estimate(value=value, n=1, scale=scale)


def change_between(a: Estimate, b: Estimate) -> Interval:
    """Return the change from A to B, with 95 % bounds by Welch's t.

    On the ``log`` scale the change is the ratio B / A, on the ``linear`` scale the
    difference B - A.

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
    # the variance decides. If neither varies, both bounds equal the value, whatever the
    # degrees of freedom, so any share will do.
    share_of_a = a.variance / variance if variance > 0 else 1.0
    degrees_of_freedom = 1 / (
        share_of_a**2 / a.degrees_of_freedom
        + (1 - share_of_a) ** 2 / b.degrees_of_freedom
    )
    change = Estimate(
        value=value,
        n=min(a.n, b.n),
        scale=a.scale,
        variance=variance,
        # Never below those of both figures, but for rounding.
        degrees_of_freedom=max(1.0, degrees_of_freedom),
    )
    return change.interval_of_comparison(SHOWN_CONFIDENCE)


def reason_without_bounds(*estimates: Estimate) -> str:
    """Return the reason why a comparison of these estimates has no bounds."""
    # A dictionary, to name each reason once and in order.
    reasons = dict.fromkeys(
        estimate.reason_without_variance
        for estimate in estimates
        if estimate.variance is None
    )
    if not reasons:
        return TOO_NOISY
    return "; ".join(reasons)


def exp_without_overflow(value: float) -> float:
    """Return the exponential of a value; above 700, that of 700, which is a float."""
    return math.exp(min(_MAX_EXPONENT, value))


def log_or_minus_infinity(value: float) -> float:
    """Return the logarithm of a value; minus infinity unless the value is positive."""
    return math.log(value) if value > 0 else -math.inf
