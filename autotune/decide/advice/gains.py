"""What it brings to take a part of a step away: Amdahl's law, with the bounds of what was measured. Pure."""

from dataclasses import replace

from autotune.core.advice import Gain
from autotune.core.bottleneck import Part
from autotune.core.interval import SHOWN_CONFIDENCE

MOST_SHARE = 0.98
"""A part never counts as more of the step than this: no gain is without end."""


def without(part: Part, *, left: float = 0.0, left_low: float | None = None, left_high: float | None = None) -> Gain:
    """The gain in tokens/s when only so much of a part is left.

    Args:
        part: Of the step.
        left: Share of it that stays.
        left_low: The same at best; None where that is as certain as ``left``.
        left_high: At worst.
    """
    low = part.share if part.low is None else part.low
    high = part.share if part.high is None else part.high
    certain = part.low is not None or left_high is not None
    return Gain(
        of="real tokens/s",
        ratio=_speedup(part.share, left),
        low=_speedup(low, left if left_high is None else left_high) if certain else None,
        high=_speedup(high, left if left_low is None else left_low) if certain else None,
        # What stays at best and at worst is assumed, and no noise.
        confidence=SHOWN_CONFIDENCE if part.low is not None and left_low is None and left_high is None else None,
        known="predicted",
    )


def times(gain: Gain, factors: tuple[float, float, float]) -> Gain:
    """With something else beside, at least, usually and at most so many times."""
    low, usual, high = factors
    return replace(
        gain,
        ratio=gain.ratio * usual,
        low=(gain.ratio if gain.low is None else gain.low) * low,
        high=(gain.ratio if gain.high is None else gain.high) * high,
        confidence=None,
    )


def _speedup(share: float, left: float) -> float:
    return 1 / (1 - min(MOST_SHARE, share) * (1 - left))
