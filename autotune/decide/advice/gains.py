"""What it brings to shorten a part of a step, or to change its micro-batch: Amdahl's law, with bounds. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune.core.advice import Gain
from autotune.core.bottleneck import StepPart
from autotune.core.interval import SHOWN_CONFIDENCE
from autotune.decide.advice.situation import Situation

Range = tuple[float, float, float]
"""Least, usual, most."""

MOST_SHARE = 0.98
"""A part never counts as more of the step than this: no gain is without end."""
UPDATE_OF_FIXED = (0.5, 0.25, 0.0)
"""Share of a step's fixed time that the update takes: most, usual, least. Every micro-batch pays the rest."""


def without(part: StepPart, left: Range | None = None) -> Gain:
    """Return the gain in tokens/s if only these shares of a part are left; None leaves nothing of it."""
    least, usual, most = left or (0.0, 0.0, 0.0)
    low, high = (part.share if bound is None else bound for bound in (part.low, part.high))
    gain = Gain.between(_speedup(low, most), _speedup(part.share, usual), _speedup(high, least))
    if left is not None:  # what stays at best and at worst is assumed, and no noise
        return gain
    if part.low is None:
        return Gain(ratio=gain.ratio)
    return replace(gain, confidence=SHOWN_CONFIDENCE)


def times(gain: Gain, factors: Range) -> Gain:
    """Return the gain with another beside it, which brings at least, usually and at most these factors."""
    low, usual, high = factors
    return Gain.between(
        (gain.ratio if gain.low is None else gain.low) * low,
        gain.ratio * usual,
        (gain.ratio if gain.high is None else gain.high) * high,
    )


def _speedup(share: float, left: float) -> float:
    return 1 / (1 - min(MOST_SHARE, share) * (1 - left))


def faster_with(now: Situation, old_rows: float, new_rows: float) -> Range | None:
    """Return the ratio of tokens/s with micro-batches of so many rows, new to old; None if too few were measured.

    A line through the measured sizes gives the fixed time of a step and that of a row. With several micro-batches to a
    step only what each of them pays is saved.
    """
    curve = now.probe.curve if now.probe is not None else []
    if len(curve) < 2 or now.train is None:
        return None
    fixed, per_row = line([point.rows for point in curve], [point.step_s for point in curve])
    rows = max(1.0, now.global_batch_rows / now.ranks)

    def rate(micro: float, update: float) -> float:
        count = max(1.0, rows / micro)
        return rows / (update * fixed + count * ((1 - update) * fixed + per_row * min(micro, rows)))

    low, usual, high = (rate(new_rows, part) / rate(old_rows, part) for part in UPDATE_OF_FIXED)
    if new_rows > max(point.rows for point in curve):  # nothing says how far the line goes on
        low, usual = min(1.0, low), math.sqrt(usual)
    return low, usual, high


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of the line with the least squared relative errors; neither is negative."""
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    slope = max(0.0, slope)
    return max(0.0, mean_y - slope * mean_x), slope
