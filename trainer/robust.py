"""Robust statistics: medians, and scatter that up to half of the values cannot move far. Pure, no torch here.

The scatter is the median absolute deviation (MAD), times 1.4826, which is the standard deviation where values are
normal (Rousseeuw and Croux 1993).
"""

import itertools
import math
from collections.abc import Sequence

SIGMAS_PER_MAD = 1.4826
MEDIAN_ERROR = 1.2533
"""Standard error of a median in units of sigma / sqrt(n): sqrt(pi / 2), asymptotically and for normal values."""


def level_and_scatter(values: Sequence[float]) -> tuple[float, float]:
    """Where values are now, and their robust standard deviation around where they were on the way."""
    whole, scatter = centre_and_scatter(sorted(values))
    half = len(values) // 2
    first, second = middle(sorted(values[:half])), middle(sorted(values[-half:]))
    if second >= first:
        return whole, scatter
    slope = (second - first) / (len(values) - half)
    middle_of_first = (half - 1) / 2
    around = [value - first - slope * (place - middle_of_first) for place, value in enumerate(values)]
    return min(whole, second), min(scatter, centre_and_scatter(sorted(around))[1])


def median_and_error(blocks: Sequence[float]) -> tuple[float, float]:
    """The median of blocks of steps, and its standard error.

    The scatter is that of neighbours' differences, to which the slope of a fall or a rise adds nothing.
    """
    differences = sorted([abs(one - other) for one, other in itertools.pairwise(blocks)])
    sigma = SIGMAS_PER_MAD * middle(differences) / math.sqrt(2) if differences else 0.0
    return middle(sorted(blocks)), MEDIAN_ERROR * sigma / math.sqrt(len(blocks))


def centre_and_scatter(ordered: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation of values in order."""
    centre = middle(ordered)
    # Two runs in order, which sorting only has to merge.
    deviations = sorted([abs(value - centre) for value in ordered])
    return centre, SIGMAS_PER_MAD * middle(deviations)


def middle(ordered: Sequence[float]) -> float:
    """The median of values in order."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    # Halved first: the sum of two finite values need not be finite.
    return ordered[half - 1] / 2 + ordered[half] / 2
