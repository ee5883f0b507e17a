"""What it brings to take a part of a step away: Amdahl's law, with the bounds of what was measured. Pure."""

from dataclasses import replace

from autotune.core.advice import Gain
from autotune.core.bottleneck import Part
from autotune.decide.bottleneck import CONFIDENCE

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
        confidence=CONFIDENCE if part.low is not None and left_low is None and left_high is None else None,
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


def ratio_of_bounds(
    new: tuple[float, float | None, float | None], old: tuple[float, float | None, float | None]
) -> tuple[float, float | None, float | None]:
    """A ratio of two figures with bounds, which were not measured side by side: the bounds add up as squares."""
    value = new[0] / old[0]
    spreads = []
    for figure, low, high in (new, old):
        if low is None or high is None:
            return value, None, None
        spreads.append(((figure - low) / figure, (high - figure) / figure))
    (new_low, new_high), (old_low, old_high) = spreads
    down = (new_low**2 + old_high**2) ** 0.5
    up = (new_high**2 + old_low**2) ** 0.5
    return value, value * max(0.0, 1 - down), value * (1 + up)
