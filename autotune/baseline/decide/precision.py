"""Precision of a speedup at which measuring ends. Pure."""

from autotune.base.interval import Interval

PRECISE_SHARE = 0.05
"""Half-width of a speedup's 95 % CI, as a share of the speedup, that is precise
enough."""


def is_precise(ratio: Interval) -> bool:
    """Return True if a speedup is precise enough to stop measuring.

    Without bounds, it is not.
    """
    if ratio.low is None or ratio.high is None:
        return False
    half_width = (ratio.high - ratio.low) / 2
    return half_width <= PRECISE_SHARE * ratio.value
