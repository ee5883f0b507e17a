"""Medians and robust standard deviations of short series.

Pure, no torch here. The robust standard deviation is the median absolute deviation
(MAD) times 1.4826, which estimates sigma for normal values (Rousseeuw and Croux 1993).
"""

import itertools
import math
from collections.abc import Sequence

SIGMAS_PER_MAD = 1.4826
MEDIAN_ERROR = 1.2533
"""Standard error of a median in units of sigma / sqrt(n): sqrt(pi / 2), asymptotically
and for normal values."""


def level_and_scatter(values: Sequence[float]) -> tuple[float, float]:
    """Return the current level of values and their robust standard deviation.

    Both are corrected for a falling trend.
    """
    whole_median, scatter = centre_and_scatter(sorted(values))
    half = len(values) // 2
    first_median = median_of_sorted(sorted(values[:half]))
    second_median = median_of_sorted(sorted(values[-half:]))
    if second_median >= first_median:
        return whole_median, scatter
    slope = (second_median - first_median) / (len(values) - half)
    middle_of_first_half = (half - 1) / 2
    deviations = [
        value - first_median - slope * (index - middle_of_first_half)
        for index, value in enumerate(values)
    ]
    _, scatter_around_trend = centre_and_scatter(sorted(deviations))
    return min(whole_median, second_median), min(scatter, scatter_around_trend)


def median_and_error(blocks: Sequence[float]) -> tuple[float, float]:
    """Return the median of blocks of steps and its standard error.

    The error is estimated from differences of neighbours, so a trend does not count.
    """
    differences = sorted(
        [abs(block - next_block) for block, next_block in itertools.pairwise(blocks)]
    )
    sigma = 0.0
    if differences:
        sigma = SIGMAS_PER_MAD * median_of_sorted(differences) / math.sqrt(2)
    error = MEDIAN_ERROR * sigma / math.sqrt(len(blocks))
    return median_of_sorted(sorted(blocks)), error


def centre_and_scatter(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the median and the robust standard deviation of sorted values."""
    centre = median_of_sorted(ordered)
    # These fall up to the centre and rise after it: two runs that sorting only merges.
    deviations = sorted([abs(value - centre) for value in ordered])
    return centre, SIGMAS_PER_MAD * median_of_sorted(deviations)


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Return the median of sorted values."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    # Halved first: the sum of two finite values need not be finite.
    return ordered[half - 1] / 2 + ordered[half] / 2
