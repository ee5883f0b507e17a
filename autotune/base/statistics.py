"""Statistics of noisy measurements: of windows in rounds, and of dependent steps. Pure.

Windows: the 20 % trimmed mean, which one disturbed window in five does not move, with
Student's t on the winsorised spread (Yuen, Biometrika 61, 1974; Wilcox, Introduction to
Robust Estimation, 3rd ed., ch. 4). Fewer than 5 are not trimmed, and fewer than 3 have
no bounds. Steps: means of blocks that hardly depend on each other (Law, Simulation
Modeling and Analysis, 5th ed., ch. 9.5), with the bias of an autocorrelation removed
(Kendall, Biometrika 41, 1954). Two such figures are compared by Welch's t (Biometrika
34, 1947).
"""

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from autotune.base.interval import CONFIDENCE, NOT_ENOUGH, SHOWN_CONFIDENCE, Interval

Value = TypeVar("Value")
Scale = Literal["log", "linear"]
"""Scale of comparison: rates and sizes by their ratio, so by logarithms; shares by
their difference."""

TRIMMED_SHARE = 0.2
MIN_WINDOWS = 3
"""Fewest windows that show a useful spread."""
MAX_HALF_WIDTH = math.log(1.5)
"""Largest useful half-width of bounds, 50 % of the value. Bounds of a ratio may be
twice as wide, by logarithms, if they tell which of two figures is higher."""
TOO_NOISY = "too noisy for so few measurements"
MIN_BLOCKS = 4
MAX_BLOCKS = 16
_TIMES_CORRELATION = 4
"""Minimum length of a block, in multiples of how long steps stay correlated."""
_STILL_CORRELATED = 0.2
"""Autocorrelation above which neighbouring blocks are merged in pairs."""
_NORMAL_FREEDOM = 1e6
"""Degrees of freedom from which Student's t is treated as the normal distribution."""
_SIMPSON_PARTS = 200
"""Parts into which Simpson's rule divides the range of an integral; an even number."""
_MAX_EXPONENT = 700.0
"""Largest argument of the exponential function that does not overflow a float, with
some margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its uncertainty."""

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
        return _log(self.value) if self.scale == "log" else self.value

    def interval(self, confidence: float = SHOWN_CONFIDENCE) -> Interval:
        """Return the figure with its bounds, or alone if they are too wide to use."""
        interval = self.ratio(confidence)
        if interval.high is None or self.scale == "linear":
            return interval
        if _log(interval.high) - self.center > MAX_HALF_WIDTH:
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
        is_undecided = low <= 0 <= high
        if half_width > MAX_HALF_WIDTH and (
            is_undecided or half_width > 2 * MAX_HALF_WIDTH
        ):
            return Interval(value=self.value)
        return Interval(
            value=self.value, low=_exp(low), high=_exp(high), confidence=confidence
        )


@functools.lru_cache(maxsize=1024)
def t_quantile(confidence: float, freedom: float) -> float:
    """Return how many standard errors on each side hold this share of Student's t.

    Exact, by Newton's method. With t = sqrt(freedom) tan(angle) the density of the
    angle is a power of its cosine (Abramowitz and Stegun, 26.7), which decreases: from
    below, no step overshoots.

    Raises:
        ValueError: If there is less than one degree of freedom.
    """
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom")
    freedom = min(freedom, _NORMAL_FREEDOM)
    scale = math.exp(
        math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    ) / math.sqrt(math.pi)
    # The normal quantile is below that of Student's t, so the search begins below.
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    angle = math.atan(normal / math.sqrt(freedom))
    step = 1.0
    while step > 1e-12:
        density = [
            scale * math.cos(angle * part / _SIMPSON_PARTS) ** (freedom - 1)
            for part in range(_SIMPSON_PARTS + 1)
        ]
        simpson_sum = (
            density[0] + 4 * sum(density[1::2]) + 2 * sum(density[2:-1:2]) + density[-1]
        )
        probability = simpson_sum * angle / _SIMPSON_PARTS / 3
        step = (confidence / 2 - probability) / density[-1]
        angle += step
    return math.sqrt(freedom) * math.tan(angle)


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the 20 % trimmed mean."""
    trimmed = int(TRIMMED_SHARE * len(values))
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def scaled_residuals(values: Sequence[float]) -> list[float]:
    """Return the deviations of values from their trimmed mean.

    They are scaled to the spread of the whole population; empty for fewer than two
    values.
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
        residuals: Deviations on that scale; those of other figures with the same noise
            may be added. By default those of the values.

    Raises:
        ValueError: If there are no values.
    """
    if not values:
        raise ValueError("no figures")
    points = [math.log(value) for value in values] if scale == "log" else values
    center = trimmed_mean(points)
    n = len(points)
    value = _exp(center) if scale == "log" else center

    spread = sorted(scaled_residuals(points) if residuals is None else residuals)
    m = len(spread)
    if m < MIN_WINDOWS:
        return Estimate(value=value, n=n, scale=scale, no_spread=NOT_ENOUGH)
    # So few values that none is trimmed have no winsorised spread either.
    is_trimmed = int(TRIMMED_SHARE * n) > 0
    trimmed = int(TRIMMED_SHARE * m) if is_trimmed else 0
    kept = m - 2 * trimmed
    lowest = spread[trimmed]
    highest = spread[m - trimmed - 1]
    winsorised = [min(max(residual, lowest), highest) for residual in spread]
    variance = statistics.pvariance(winsorised) * (m - 1) / (kept * (kept - 1)) * m / n
    return Estimate(value=value, n=n, scale=scale, variance=variance, freedom=kept - 1)


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
    interval = estimate.ratio(1 - (1 - confidence) / candidates)
    return replace(interval, confidence=None if interval.low is None else confidence)


def estimate_single(value: float, *, scale: Scale = "log") -> Estimate:
    """Return a figure that was measured once."""
    return Estimate(value=value, n=1, scale=scale)


def estimate_from_bounds(interval: Interval, n: int | None = None) -> Estimate:
    """Return the figure with these bounds.

    Args:
        interval: The figure with its bounds.
        n: Number of windows, for Student's t; a normal distribution if None.
    """
    low, high, confidence = interval.low, interval.high, interval.confidence
    if low is None or high is None or confidence is None or low <= 0:
        return Estimate(
            value=interval.value,
            n=n or 1,
            no_spread=NOT_ENOUGH if n else "its prediction shows no spread",
        )
    freedom = _NORMAL_FREEDOM
    if n is not None:
        freedom = max(1, n - 2 * int(TRIMMED_SHARE * n) - 1)
    half_width = math.log(high / low) / 2
    variance = (half_width / t_quantile(confidence, freedom)) ** 2
    return Estimate(value=interval.value, n=n or 1, variance=variance, freedom=freedom)


def estimate_plausible_steps(
    pairs: Sequence[tuple[float, float]], *, scale: Scale = "log"
) -> Estimate | None:
    """Return ``estimate_steps`` of the plausible pairs of an untrusted file.

    Args:
        pairs: Amount and size of each step.
        scale: Scale of comparison.

    Returns:
        The estimate, or None if no pair is plausible.
    """
    amounts: list[float] = []
    sizes: list[float] = []
    for amount, size in pairs:
        is_finite = math.isfinite(amount) and math.isfinite(size)
        if is_finite and size > 0 and (amount > 0 or scale == "linear"):
            amounts.append(amount)
            sizes.append(size)
    return estimate_steps(amounts, sizes, scale=scale) if amounts else None


def estimate_steps(
    amounts: Sequence[float], sizes: Sequence[float], *, scale: Scale = "log"
) -> Estimate:
    """Return all amounts over all sizes of steps that depend on their neighbours.

    Variation slower than the whole series is left out.

    Args:
        amounts: Amount of each step, such as its tokens; positive on the ``log`` scale.
        sizes: Size of each step, such as its seconds; positive.
        scale: Scale of comparison.
    """
    value = sum(amounts) / sum(sizes)
    rates = [amount / size for amount, size in zip(amounts, sizes, strict=True)]
    points = [math.log(rate) for rate in rates] if scale == "log" else rates
    count = block_count(points)
    means = [
        sum(block_amounts) / sum(block_sizes)
        for block_amounts, block_sizes in zip(
            split_blocks(amounts, count), split_blocks(sizes, count), strict=True
        )
    ]
    return estimate_blocks(value, means, scale=scale, n=len(rates))


def estimate_blocks(
    value: float, means: Sequence[float], *, scale: Scale = "linear", n: int
) -> Estimate:
    """Return a figure of ``n`` steps, with the variance of its means over blocks.

    One block shows no spread.
    """
    if len(means) < 2:
        return Estimate(
            value=value,
            n=n,
            scale=scale,
            no_spread="too few steps for how slowly they vary",
        )
    points = [math.log(mean) for mean in means] if scale == "log" else means
    variance = statistics.variance(points) / len(points)
    return Estimate(
        value=value, n=n, scale=scale, variance=variance, freedom=len(points) - 1
    )


def block_count(points: Sequence[float]) -> int:
    """Return how many blocks to cut a series into.

    Returns:
        The number of blocks, or 0 if the series is too short for how long steps stay
        correlated.
    """
    memory = min(max(_autocorrelation(points), 0.0), 0.99)
    length = 1
    if memory > 0:
        # A series of this autocorrelation forgets after (1 + memory) / (1 - memory)
        # steps.
        correlated_steps = (1 + memory) / (1 - memory)
        length = max(1, math.ceil(_TIMES_CORRELATION * correlated_steps))
    count = min(MAX_BLOCKS, len(points) // length)
    while count >= 2 * MIN_BLOCKS:
        means = [statistics.fmean(block) for block in split_blocks(points, count)]
        if _autocorrelation(means) <= _STILL_CORRELATED:
            break
        count //= 2
    return count if count >= MIN_BLOCKS else 0


def split_blocks(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """Return consecutive blocks whose lengths differ by at most one."""
    if not count:
        return []
    ends = [len(values) * number // count for number in range(count + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]


def _autocorrelation(points: Sequence[float]) -> float:
    """Return the autocorrelation of neighbours, corrected for its bias towards less.

    It is 0 if nothing varies.
    """
    n = len(points)
    mean = statistics.fmean(points)
    deviations = [point - mean for point in points]
    total = sum(deviation * deviation for deviation in deviations)
    if n < 3 or total <= 0:
        return 0.0
    products = (first * second for first, second in itertools.pairwise(deviations))
    correlation = sum(products) / total
    return correlation + (1 + 4 * correlation) / n


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
    estimate = Estimate(
        value=_exp(center) if a.scale == "log" else center,
        n=min(a.n, b.n),
        scale=a.scale,
    )
    if a.variance is not None and b.variance is not None:
        variance = a.variance + b.variance
        part = a.variance / variance if variance > 0 else 1.0
        # Welch and Satterthwaite.
        freedom = 1 / (part**2 / a.freedom + (1 - part) ** 2 / b.freedom)
        estimate = replace(estimate, variance=variance, freedom=max(1.0, freedom))
    return estimate.ratio(SHOWN_CONFIDENCE)


def reason_without_bounds(*estimates: Estimate) -> str:
    """Return the reason why a comparison of these estimates has no bounds."""
    # A dictionary, to name each reason once and in order.
    reasons = dict.fromkeys(
        estimate.no_spread for estimate in estimates if estimate.variance is None
    )
    return "; ".join(reasons) or TOO_NOISY


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the ratio of B to A, positive figures of the same steps.

    Returns:
        The ratio with 95 % bounds, which are None if there are too few steps.
    """
    logs = [math.log(second / first) for first, second in zip(a, b, strict=True)]
    estimate = estimate_steps(logs, [1.0] * len(logs), scale="linear")
    return replace(estimate, value=_exp(estimate.value), scale="log").ratio(
        SHOWN_CONFIDENCE
    )


def _exp(value: float) -> float:
    return math.exp(min(_MAX_EXPONENT, value))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
