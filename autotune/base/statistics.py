"""Statistics of noisy measurements: of windows in rounds, and of steps that depend on their neighbours. Pure.

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
MIN_BLOCKS, MAX_BLOCKS = 4, 16
_TIMES_CORRELATION = 4
"""Minimum length of a block, in multiples of how long steps stay correlated."""
_STILL_CORRELATED = 0.2
"""Autocorrelation above which neighbouring blocks are merged in pairs."""
_NORMAL_FREEDOM = 1e6
"""Degrees of freedom from which Student's t is treated as the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its uncertainty."""

    value: float
    n: int
    scale: Scale = "log"
    variance: float | None = None
    """Variance of the figure on its scale; None if the measurements show no spread that
    can be trusted."""
    freedom: float = 0.0
    no_spread: str = "one figure shows no spread"

    @property
    def center(self) -> float:
        """The figure on its scale."""
        return _log(self.value) if self.scale == "log" else self.value

    def interval(self, confidence: float = SHOWN_CONFIDENCE) -> Interval:
        """Return the figure with its bounds.

        Without them if they are too wide to be useful.
        """
        found = self.ratio(confidence)
        wide = (
            found.high is not None
            and self.scale == "log"
            and _log(found.high) - self.center > MAX_HALF_WIDTH
        )
        return Interval(value=self.value) if wide else found

    def ratio(self, confidence: float = CONFIDENCE) -> Interval:
        """Return a ratio, or a difference of shares, with its bounds.

        Without if they are neither narrow nor clear.
        """
        if self.variance is None:
            return Interval(value=self.value)
        half = t_quantile(confidence, self.freedom) * math.sqrt(self.variance)
        low, high = self.center - half, self.center + half
        if self.scale == "linear":
            return Interval(value=self.value, low=low, high=high, confidence=confidence)
        if half > MAX_HALF_WIDTH and (low <= 0 <= high or half > 2 * MAX_HALF_WIDTH):
            return Interval(value=self.value)
        return Interval(
            value=self.value, low=_exp(low), high=_exp(high), confidence=confidence
        )


@functools.lru_cache(maxsize=1024)
def t_quantile(confidence: float, freedom: float) -> float:
    """Return how many standard errors on each side hold this share of Student's t: exact, by Newton's method.

    With t = sqrt(freedom) tan(angle) the density of the angle is a power of its cosine
    (Abramowitz and Stegun, 26.7), which decreases: from below, no step overshoots.
    Raise ``ValueError`` if there is less than one degree of freedom.
    """
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom")
    freedom = min(freedom, _NORMAL_FREEDOM)
    scale = math.exp(
        math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    ) / math.sqrt(math.pi)
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    angle, parts, step = math.atan(normal / math.sqrt(freedom)), 200, 1.0
    while step > 1e-12:
        density = [
            scale * math.cos(angle * part / parts) ** (freedom - 1)
            for part in range(parts + 1)
        ]
        simpson = (
            density[0] + 4 * sum(density[1::2]) + 2 * sum(density[2:-1:2]) + density[-1]
        )
        step = (confidence / 2 - simpson * angle / parts / 3) / density[-1]
        angle += step
    return math.sqrt(freedom) * math.tan(angle)


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the 20 % trimmed mean."""
    cut = int(TRIMMED_SHARE * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def scaled_residuals(values: Sequence[float]) -> list[float]:
    """Return the deviations of values from their location, scaled to the spread of the whole population."""
    n = len(values)
    if n < 2:
        return []
    center, wider = trimmed_mean(values), math.sqrt(n / (n - 1))
    return [wider * (value - center) for value in values]


def estimate_windows(
    values: Sequence[float],
    *,
    scale: Scale = "log",
    residuals: Sequence[float] | None = None,
) -> Estimate:
    """Return the location of independent measurements: rates of windows, or ratios within rounds.

    Residuals are on the scale; those of figures with this noise may be added. Raise
    ``ValueError`` without values.
    """
    if not values:
        raise ValueError("no figures")
    points = [math.log(value) for value in values] if scale == "log" else values
    center, n = trimmed_mean(points), len(points)
    value = _exp(center) if scale == "log" else center
    spread = sorted(scaled_residuals(points) if residuals is None else residuals)
    if (m := len(spread)) < MIN_WINDOWS:
        return Estimate(value=value, n=n, scale=scale, no_spread=NOT_ENOUGH)
    cut = int(TRIMMED_SHARE * m) if int(TRIMMED_SHARE * n) else 0
    left = m - 2 * cut
    winsorised = [min(max(one, spread[cut]), spread[m - cut - 1]) for one in spread]
    variance = statistics.pvariance(winsorised) * (m - 1) / (left * (left - 1)) * m / n
    return Estimate(value=value, n=n, scale=scale, variance=variance, freedom=left - 1)


def paired_ratio(
    pairs: Sequence[tuple[float, float]],
    *,
    confidence: float = CONFIDENCE,
    candidates: int = 1,
) -> Interval:
    """Return the ratio of the first to the second of figures that were measured in the same rounds.

    If this one of ``candidates`` ratios may have been picked as the highest, its bounds are
    widened until all ratios lie within theirs with the same confidence (Bonferroni).
    Raise ``ValueError`` if there are no figures.
    """
    found = estimate_windows([first / second for first, second in pairs]).ratio(
        1 - (1 - confidence) / candidates
    )
    return replace(found, confidence=None if found.low is None else confidence)


def estimate_single(value: float, *, scale: Scale = "log") -> Estimate:
    """Return a figure that was measured once."""
    return Estimate(value=value, n=1, scale=scale)


def estimate_from_bounds(found: Interval, n: int | None = None) -> Estimate:
    """Return the figure with these bounds, by Student's t of ``n`` windows.

    Without ``n``, by a normal distribution.
    """
    if (
        found.low is None
        or found.high is None
        or found.confidence is None
        or found.low <= 0
    ):
        return Estimate(
            value=found.value,
            n=n or 1,
            no_spread=NOT_ENOUGH if n else "its prediction shows no spread",
        )
    freedom = (
        _NORMAL_FREEDOM if n is None else max(1, n - 2 * int(TRIMMED_SHARE * n) - 1)
    )
    half = math.log(found.high / found.low) / 2
    variance = (half / t_quantile(found.confidence, freedom)) ** 2
    return Estimate(value=found.value, n=n or 1, variance=variance, freedom=freedom)


def estimate_plausible_steps(
    pairs: Sequence[tuple[float, float]], *, scale: Scale = "log"
) -> Estimate | None:
    """Return ``of_steps`` of the plausible amounts and sizes of an untrusted file.

    None if there are none.
    """
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    sound = [
        (amount, size)
        for amount, size in finite
        if size > 0 and (amount > 0 or scale == "linear")
    ]
    return estimate_steps(*zip(*sound, strict=True), scale=scale) if sound else None


def estimate_steps(
    amounts: Sequence[float], sizes: Sequence[float], *, scale: Scale = "log"
) -> Estimate:
    """Return all amounts over all sizes, such as tokens over seconds, of steps that depend on their neighbours.

    Variation slower than the whole series is left out. Sizes are positive, on the
    ``log`` scale amounts too.
    """
    value, readings = (
        sum(amounts) / sum(sizes),
        [one / size for one, size in zip(amounts, sizes, strict=True)],
    )
    count = block_count(
        [math.log(one) for one in readings] if scale == "log" else readings
    )
    means = [
        sum(part) / sum(size)
        for part, size in zip(
            split_blocks(amounts, count), split_blocks(sizes, count), strict=True
        )
    ]
    return estimate_blocks(value, means, scale=scale, n=len(readings))


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

    0 if it is too short for how long steps stay correlated.
    """
    memory = min(max(_autocorrelation(points), 0.0), 0.99)
    length = (
        max(1, math.ceil(_TIMES_CORRELATION * (1 + memory) / (1 - memory)))
        if memory > 0
        else 1
    )
    count = min(MAX_BLOCKS, len(points) // length)
    while count >= 2 * MIN_BLOCKS:
        if (
            _autocorrelation(
                [statistics.fmean(block) for block in split_blocks(points, count)]
            )
            <= _STILL_CORRELATED
        ):
            break
        count //= 2
    return count if count >= MIN_BLOCKS else 0


def split_blocks(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """Return consecutive blocks whose lengths differ by at most one."""
    ends = (
        [len(values) * number // count for number in range(count + 1)] if count else []
    )
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]


def _autocorrelation(points: Sequence[float]) -> float:
    """Return the autocorrelation of neighbours, corrected for its bias towards less.

    0 if nothing varies.
    """
    n, mean = len(points), statistics.fmean(points)
    offs = [point - mean for point in points]
    whole = sum(off * off for off in offs)
    if n < 3 or whole <= 0:
        return 0.0
    found = sum(first * second for first, second in itertools.pairwise(offs)) / whole
    return found + (1 + 4 * found) / n


def difference(a: Estimate, b: Estimate) -> Interval:
    """Return B over A, or for shares B - A, with 95 % bounds by Welch's t.

    Raise ``ValueError`` on different scales.
    """
    if a.scale != b.scale:
        raise ValueError(
            f"a figure on the {a.scale} scale and one on the {b.scale} scale"
        )
    center = b.center - a.center
    both = Estimate(
        value=_exp(center) if a.scale == "log" else center,
        n=min(a.n, b.n),
        scale=a.scale,
    )
    if a.variance is not None and b.variance is not None:
        variance = a.variance + b.variance
        part = a.variance / variance if variance > 0 else 1.0
        freedom = 1 / (part**2 / a.freedom + (1 - part) ** 2 / b.freedom)
        both = replace(both, variance=variance, freedom=max(1.0, freedom))
    return both.ratio(SHOWN_CONFIDENCE)


def reason_without_bounds(*sides: Estimate) -> str:
    """Return the reason why a comparison has no bounds."""
    return (
        "; ".join(dict.fromkeys(one.no_spread for one in sides if one.variance is None))
        or TOO_NOISY
    )


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the ratio of B to A, positive figures of the same steps.

    95 % bounds, None if there are too few steps.
    """
    logs = [math.log(second / first) for first, second in zip(a, b, strict=True)]
    found = estimate_steps(logs, [1.0] * len(logs), scale="linear")
    return replace(found, value=_exp(found.value), scale="log").ratio(SHOWN_CONFIDENCE)


def _exp(value: float) -> float:
    return math.exp(min(700.0, value))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
