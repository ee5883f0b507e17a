"""Medians and robust standard deviations of short series.

Pure, no torch here. The robust standard deviation is the median absolute deviation
(MAD) times 1.4826, which estimates sigma for normal values (Rousseeuw and Croux 1993).
"""

import itertools
import math
from collections.abc import Sequence

SIGMAS_PER_MAD = 1.4826
"""Sigma of normal values divided by their MAD."""
MEDIAN_ERROR = 1.2533
"""Standard error of the median of n values in units of sigma / sqrt(n): sqrt(pi / 2),
for many normal values."""


def level_and_scatter(values: Sequence[float]) -> tuple[float, float]:
    """Return the current level of a series and its robust standard deviation.

    The level is the median, and the deviation is measured from it. If values fall from
    the first half to the second, each has a second candidate, and the lower one is
    returned: as level the median of the second half, and as deviation that from the
    line through the medians of both halves.

    Args:
        values: Values in the order of time, at least two.
    """
    whole_median, scatter = centre_and_scatter(sorted(values))
    half = len(values) // 2
    first_median = median_of_sorted(sorted(values[:half]))
    second_median = median_of_sorted(sorted(values[-half:]))
    if second_median >= first_median:
        return whole_median, scatter
    # The line: each median is that of the value in the middle of its half, and the two
    # middles are ``len(values) - half`` steps apart.
    slope = (second_median - first_median) / (len(values) - half)
    middle_of_first_half = (half - 1) / 2
    deviations = [
        value - first_median - slope * (index - middle_of_first_half)
        for index, value in enumerate(values)
    ]
    _, scatter_around_line = centre_and_scatter(sorted(deviations))
    return min(whole_median, second_median), min(scatter, scatter_around_line)


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of a series and its standard error.

    The error is estimated from the differences of neighbours, in which a trend over the
    whole series hardly counts. It is 0 for a single value.

    Args:
        values: Values in the order of time, at least one.
    """
    differences = sorted(
        [abs(value - next_value) for value, next_value in itertools.pairwise(values)]
    )
    sigma = 0.0
    if differences:
        # A difference of two values has the variance of both.
        sigma = SIGMAS_PER_MAD * median_of_sorted(differences) / math.sqrt(2)
    error = MEDIAN_ERROR * sigma / math.sqrt(len(values))
    return median_of_sorted(sorted(values)), error


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
