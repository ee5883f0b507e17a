"""Where noisy readings lie: the 20 % trimmed mean, and its bootstrap interval. Pure; the same readings say the same.

Sources: Wilcox, Introduction to Robust Estimation, 3rd ed., ch. 4; Hesterberg, The American Statistician 69, 2015.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autotune.decide.statistics import Interval, normal_quantile, t_quantile

CONFIDENCE = 0.98
"""Of an interval that a decision rests on. Looking again after every few rounds gives chance more than one try, so this
is more than the usual 95 %."""
TRIMMED_SHARE = 0.2
LEAST_RESIDUALS = 3
"""Fewer show no spread."""
RESAMPLES = 1000
Array = npt.NDArray[np.float64]


def paired_ratio(pairs: Sequence[tuple[float, float]], *, of: int = 1) -> Interval:
    """The ratio of the first to the second of figures that were read one after the other.

    Args:
        pairs: The figures.
        of: As many such ratios were read, and this one may have been picked as the highest: its bounds are so wide that
            all of them lie within theirs with the same confidence (Bonferroni).
    """
    differences = np.array([math.log(first / second) for first, second in pairs])
    return ratio_of(differences, residuals_of(differences), confidence=1 - (1 - CONFIDENCE) / of)


def location(values: Array) -> float:
    """The 20 % trimmed mean."""
    cut = int(TRIMMED_SHARE * len(values))
    return float(np.sort(values)[cut : len(values) - cut].mean())


def residuals_of(differences: Array) -> Array:
    """About their location, as wide as those of the whole population."""
    n = len(differences)
    if n < 2:
        return np.zeros(0)
    return np.asarray((differences - location(differences)) * math.sqrt(n / (n - 1)))


def ratio_of(differences: Array, residuals: Array, *, confidence: float = CONFIDENCE) -> Interval:
    """The ratio whose logarithm lies where these do, with bounds from what they are off by; none from too few."""
    value = location(differences)
    if len(residuals) < LEAST_RESIDUALS:
        return Interval(value=math.exp(value), low=None, high=None)
    low, high = _spread(residuals, len(differences), confidence)
    return Interval(value=math.exp(value), low=math.exp(value + low), high=math.exp(value + high))


def _spread(residuals: Array, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Between what the location of so many residuals lies."""
    drawn = residuals[_resampling(len(residuals), n)]
    cut = int(TRIMMED_SHARE * n)
    if cut:
        drawn = np.partition(drawn, (cut, n - cut - 1), axis=1)[:, cut : n - cut]
    locations = drawn.mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(locations, [tail, 1 - tail])
    wider = t_quantile(confidence, len(residuals) - 1) / normal_quantile(confidence)
    return float(low) * wider, float(high) * wider


def upper_location(values: Array) -> float:
    """The upper bound of where values lie."""
    return location(values) + _spread(residuals_of(values), len(values))[1]


@functools.lru_cache(maxsize=64)
def _resampling(population: int, n: int) -> npt.NDArray[np.int64]:
    """The same draws every time, so that the same readings always say the same."""
    return np.random.default_rng(population * 100_003 + n).integers(0, population, (RESAMPLES, n))
