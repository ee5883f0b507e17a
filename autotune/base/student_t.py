"""Quantiles of Student's t distribution. Pure."""

import functools
import math
import statistics
from collections.abc import Sequence

NORMAL_DEGREES_OF_FREEDOM = 1e6
"""Degrees of freedom from which Student's t is treated as the normal distribution."""
_SIMPSON_PARTS = 200
"""Parts into which Simpson's rule divides the range of an integral; an even number."""
_SMALLEST_STEP = 1e-12
"""Step of Newton's method, in radians, that is too small to matter."""


@functools.lru_cache(maxsize=1024)
def t_quantile(confidence: float, degrees_of_freedom: float) -> float:
    """Return how many standard errors on each side hold this share of Student's t.

    With t = sqrt(freedom) tan(angle), the density of the angle is a power of its cosine
    (Abramowitz and Stegun, 26.7). Simpson's rule integrates it, and Newton's method
    finds the angle at which the integral is half of the confidence.

    Raises:
        ValueError: If there is less than one degree of freedom.
    """
    if degrees_of_freedom < 1:
        raise ValueError(f"{degrees_of_freedom} degrees of freedom")
    freedom = min(degrees_of_freedom, NORMAL_DEGREES_OF_FREEDOM)
    scale = math.exp(
        math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    ) / math.sqrt(math.pi)
    # The normal quantile is below that of Student's t. As the density decreases, no
    # step from below overshoots, so that all steps are positive.
    normal = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    angle = math.atan(normal / math.sqrt(freedom))
    step = 1.0
    while step > _SMALLEST_STEP:
        densities = [
            scale * math.cos(angle * part / _SIMPSON_PARTS) ** (freedom - 1)
            for part in range(_SIMPSON_PARTS + 1)
        ]
        probability = _simpson_integral(densities, angle)
        step = (confidence / 2 - probability) / densities[-1]
        angle += step
    return math.sqrt(freedom) * math.tan(angle)


def _simpson_integral(values: Sequence[float], length: float) -> float:
    """Return the integral of a function over a range by Simpson's rule.

    Args:
        values: Values of the function at an odd number of equidistant points.
        length: Length of the range.
    """
    weighted_sum = (
        values[0] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2]) + values[-1]
    )
    return weighted_sum * length / (len(values) - 1) / 3
