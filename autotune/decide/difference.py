"""Whether two noisy figures differ: from steps that depend on their neighbours, from windows, or from bounds. Pure.

Sources: means of blocks for readings that are autocorrelated, Law, Simulation Modeling and Analysis, 5th ed., ch. 9.5;
means of unequal spread, Welch, Biometrika 34, 1947; bias of an autocorrelation, Kendall, Biometrika 41, 1954.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.decide.statistics import Interval, normal_quantile

Scale = Literal["log", "linear"]
"""Rates and sizes are compared by their ratio, so by logarithms; shares by how many points they differ."""

LEAST_BLOCKS, MOST_BLOCKS = 4, 16
_TIMES_CORRELATION = 4
"""How many times as long as steps remember each other a block is at least."""
_MOST_NEWTON_STEPS = 50
_AS_GOOD_AS_NORMAL = 1e6
"""Degrees of freedom, with which Student's t is the normal distribution."""
_STILL_CORRELATED = 0.2
"""Blocks that remember each other more than this are put together, two and two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure, and how well it is known."""

    value: float
    n: int
    """Readings that it rests on."""
    scale: Scale = "log"
    variance: float | None = None
    """Of the figure, on its scale; None where the readings show no spread that could be trusted."""
    freedom: float = 0.0
    """Degrees of freedom of the variance."""
    no_spread: str = "one figure shows no spread"
    """Why there is no variance."""

    @property
    def center(self) -> float:
        """The figure on its scale."""
        return math.log(self.value) if self.scale == "log" else self.value

    @property
    def interval(self) -> Interval:
        """The figure with its 95 % bounds."""
        if self.variance is None:
            return Interval(value=self.value, low=None, high=None)
        half = t_95(self.freedom) * math.sqrt(self.variance)
        low, high = self.center - half, self.center + half
        if self.scale == "log":
            low, high = _exp(low), _exp(high)
        return Interval(value=self.value, low=low, high=high)


def of_one(value: float, *, scale: Scale = "log") -> Estimate:
    """A figure that was read once."""
    return Estimate(value=value, n=1, scale=scale)


def of_readings(values: Sequence[float]) -> Estimate:
    """The geometric mean of positive readings that do not depend on each other, such as windows.

    Raises:
        ValueError: If there are none.
    """
    logs = [math.log(value) for value in values]
    return _mean(logs, "log", n=len(logs))


def of_bounds(value: float, low: float | None, high: float | None, n: int) -> Estimate:
    """A figure of ``n`` readings whose 95 % bounds were kept, by Student's t on logarithms."""
    if low is None or high is None or n < 2:
        return Estimate(value=value, n=n)
    half = (math.log(high) - math.log(low)) / 2
    return Estimate(value=value, n=n, variance=(half / t_95(n - 1)) ** 2, freedom=n - 1)


def of_interval(value: float, low: float | None, high: float | None, confidence: float) -> Estimate:
    """A figure that was predicted, with bounds of so much confidence, by a normal distribution of its logarithm."""
    if low is None or high is None or low <= 0:
        return Estimate(value=value, n=1, no_spread="what it was predicted from shows no spread")
    half = (math.log(high) - math.log(low)) / 2
    return Estimate(value=value, n=1, variance=(half / normal_quantile(confidence)) ** 2, freedom=_AS_GOOD_AS_NORMAL)


def of_sound_steps(pairs: Sequence[tuple[float, float]], *, scale: Scale = "log") -> Estimate | None:
    """``of_steps`` for amounts and sizes as files of others hold them; None where none of them are figures."""
    sound = [
        (amount, size)
        for amount, size in pairs
        if math.isfinite(amount) and math.isfinite(size) and size > 0 and (amount > 0 or scale == "linear")
    ]
    if not sound:
        return None
    amounts, sizes = zip(*sound, strict=True)
    return of_steps(amounts, sizes, scale=scale)


def of_steps(amounts: Sequence[float], sizes: Sequence[float], *, scale: Scale = "log") -> Estimate:
    """All amounts over all sizes, such as tokens over seconds, of steps that depend on their neighbours.

    Steps are put together to blocks, long enough that blocks hardly depend on each other; their spread is the noise.
    Left out: what changes more slowly than the whole series lasts.

    Args:
        amounts: Of each step; positive on the ``log`` scale.
        sizes: Of each step, positive.
        scale: How figures are compared.

    Raises:
        ValueError: If there are none.
    """
    value = sum(amounts) / sum(sizes)
    readings = [amount / size for amount, size in zip(amounts, sizes, strict=True)]
    points = [math.log(reading) for reading in readings] if scale == "log" else readings
    blocks = block_count(points)
    if blocks is None:
        return Estimate(value=value, n=len(points), scale=scale, no_spread="too few steps for how slowly they vary")
    means = [sum(part) / sum(size) for part, size in zip(_cut(amounts, blocks), _cut(sizes, blocks), strict=True)]
    found = _mean([math.log(mean) for mean in means] if scale == "log" else means, scale, n=len(points))
    return Estimate(value=value, n=len(points), scale=scale, variance=found.variance, freedom=found.freedom)


def block_count(points: Sequence[float]) -> int | None:
    """Into how many blocks a series is cut; None where it is too short for how long steps remember each other."""
    memory = min(max(_autocorrelation(points), 0.0), 0.99)
    length = max(1, math.ceil(_TIMES_CORRELATION * (1 + memory) / (1 - memory))) if memory > 0 else 1
    blocks = min(MOST_BLOCKS, len(points) // length)
    if blocks < LEAST_BLOCKS:
        return None
    while blocks >= 2 * LEAST_BLOCKS:
        means = [statistics.fmean(block) for block in _cut(points, blocks)]
        if _autocorrelation(means) <= _STILL_CORRELATED:
            break
        blocks //= 2
    return blocks


def difference(a: Estimate, b: Estimate) -> Interval:
    """What B is of A, as a ratio; for shares, what B is more than A. 95 % bounds by Welch's t.

    Raises:
        ValueError: If they are on different scales.
    """
    if a.scale != b.scale:
        raise ValueError(f"a figure on the {a.scale} scale and one on the {b.scale} scale")
    center = b.center - a.center
    value = _exp(center) if a.scale == "log" else center
    if a.variance is None or b.variance is None:
        return Interval(value=value, low=None, high=None)
    both = a.variance + b.variance
    half = 0.0
    if both > 0:
        half = t_95(both**2 / (a.variance**2 / a.freedom + b.variance**2 / b.freedom)) * math.sqrt(both)
    low, high = center - half, center + half
    if a.scale == "log":
        low, high = _exp(low), _exp(high)
    return Interval(value=value, low=low, high=high)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """The ratio of B to A, positive figures of the same steps; 95 % bounds, None where there are too few steps.

    Raises:
        ValueError: If there are none.
    """
    logs = [math.log(second / first) for first, second in zip(a, b, strict=True)]
    found = of_steps(logs, [1.0] * len(logs), scale="linear").interval
    low, high = found.low, found.high
    return Interval(
        value=_exp(found.value), low=None if low is None else _exp(low), high=None if high is None else _exp(high)
    )


@functools.lru_cache(maxsize=256)
def t_95(freedom: float) -> float:
    """How many standard errors to both sides hold 95 % of Student's t, by Newton's method on its integral.

    Raises:
        ValueError: If there is less than one degree of freedom.
    """
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom")
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2

    def density(x: float) -> float:
        return math.exp(log_scale - (freedom + 1) / 2 * math.log1p(x * x / freedom))

    found = 1.9  # below the answer, from where every step goes towards it and none beyond: the integral is concave
    for _ in range(_MOST_NEWTON_STEPS):
        step = (0.95 / 2 - _integral(density, found)) / density(found)
        found += step
        if step < 1e-6:
            break
    return found


def _integral(density: Callable[[float], float], end: float, *, parts: int = 200) -> float:
    """From 0, by Simpson's rule."""
    width = end / parts
    inner = sum((4 if number % 2 else 2) * density(number * width) for number in range(1, parts))
    return (density(0.0) + inner + density(end)) * width / 3


def _mean(points: Sequence[float], scale: Scale, *, n: int) -> Estimate:
    center = statistics.fmean(points)
    value = _exp(center) if scale == "log" else center
    if len(points) < 2:
        return Estimate(value=value, n=n, scale=scale)
    variance = statistics.variance(points) / len(points)
    return Estimate(value=value, n=n, scale=scale, variance=variance, freedom=len(points) - 1)


def _autocorrelation(points: Sequence[float]) -> float:
    """Between neighbours, freed of its bias towards less; 0 where nothing varies."""
    n = len(points)
    if n < 3:
        return 0.0
    mean = statistics.fmean(points)
    offs = [point - mean for point in points]
    whole = sum(off * off for off in offs)
    if whole <= 0:
        return 0.0
    found = sum(first * second for first, second in itertools.pairwise(offs)) / whole
    return found + (1 + 4 * found) / n


def _cut(values: Sequence[float], blocks: int) -> list[Sequence[float]]:
    """Consecutive blocks that differ in length by one at most."""
    ends = [len(values) * number // blocks for number in range(blocks + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]


def _exp(value: float) -> float:
    return math.exp(min(700.0, value))
