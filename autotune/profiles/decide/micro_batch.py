"""Choice of the micro-batch size by the time of an optimizer step. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.memory.values import CurvePoint
from autotune.profiles.decide.batch_split import (
    SPLIT_FACTORS,
    GlobalBatchSplit,
    split_global_batch,
)

KNEE_SHARE = 0.98
"""Share of the best throughput above which a size counts as equal to the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChoice:
    """Micro-batch size to train with, and why it is not the largest that fits."""

    micro_batch_size: int
    reason: str


def with_headroom(feasible_max: int, headroom_share: float) -> int:
    """Return the largest micro-batch size that leaves the headroom free; at least 1."""
    return max(1, math.floor(feasible_max * (1 - headroom_share)))


def curve_sizes(largest_size: int) -> list[int]:
    """Return the micro-batch sizes at which throughput is measured.

    They are the powers of two below the largest size, and this size itself.
    """
    powers = [
        2**exponent
        for exponent in range(largest_size.bit_length())
        if 2**exponent < largest_size
    ]
    return [*powers, largest_size]


def choose_micro_batch(
    curve: Sequence[CurvePoint],
    feasible_max: int,
    *,
    global_batch_size: int,
    ranks: int,
    sizes: Sequence[int] | None = None,
) -> MicroBatchChoice:
    """Return the smallest micro-batch size within 2 % of the shortest optimizer step.

    The time of a step is predicted. A step takes as many micro-batches as hold the
    global batch, each as long as the curve predicts, empty sequences included: 65
    sequences take 8 micro-batches of 9, or 13 of 5.

    Args:
        curve: Measured throughput by micro-batch size; its largest point leaves the
            headroom free.
        feasible_max: Largest micro-batch size that fits.
        global_batch_size: Sequences of an optimizer step over all ranks.
        ranks: Ranks that train together.
        sizes: Candidates; without any, only measured sizes are.
    """
    points = sorted(curve, key=lambda point: point.micro_batch_size)
    largest_size = points[-1].micro_batch_size
    if not sizes:
        sizes = [point.micro_batch_size for point in points]
    # A rank has at least one sequence.
    global_batch_size = max(global_batch_size, ranks)
    steps = [
        _predicted_step(points, size, global_batch_size, ranks)
        for size in sizes
        if size <= largest_size
    ]
    shortest_s = min(step.step_s for step in steps)
    # Of steps that take as long, the smallest micro-batch leaves the most memory free.
    chosen = min(
        (step for step in steps if step.step_s * KNEE_SHARE <= shortest_s),
        key=lambda step: step.size,
    )
    largest = _predicted_step(points, largest_size, global_batch_size, ranks)
    return MicroBatchChoice(
        micro_batch_size=chosen.size,
        reason=_reason_of_choice(chosen, largest, feasible_max, ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PredictedStep:
    """Optimizer step with micro-batches of at most a size."""

    size: int
    """Largest micro-batch size to use; the split may need a smaller one."""
    split: GlobalBatchSplit
    step_s: float
    """Predicted time in seconds per position of a sequence, which only compares
    steps."""


def _predicted_step(
    points: Sequence[CurvePoint], size: int, global_batch_size: int, ranks: int
) -> _PredictedStep:
    """Predict an optimizer step, its micro-batches interpolated between points."""
    split = split_global_batch(global_batch_size, size, ranks)
    measured_sizes = [point.micro_batch_size for point in points]
    micro_batches_s = [
        point.micro_batch_size / point.padded_tokens_per_s for point in points
    ]
    micro_batch_s = np.interp(split.micro_batch_size, measured_sizes, micro_batches_s)
    return _PredictedStep(
        size=size,
        split=split,
        step_s=split.gradient_accumulation_steps * float(micro_batch_s),
    )


def _reason_of_choice(
    chosen: _PredictedStep, largest: _PredictedStep, feasible_max: int, ranks: int
) -> str:
    """Return why a micro-batch size was chosen, and not the largest that fits.

    Args:
        chosen: Step with the chosen size.
        largest: Step with the largest size that leaves the headroom free.
        feasible_max: Largest micro-batch size that fits.
        ranks: Ranks that train together.
    """
    if chosen.split.gradient_accumulation_steps == 1:
        per_rank = " per rank" if ranks > 1 else ""
        return (
            f"{feasible_max} fit; your global batch needs"
            f" {chosen.split.micro_batch_size}{per_rank}"
        )
    split_words = f"{chosen.split.words(ranks)} ({SPLIT_FACTORS})"
    fit = f"{feasible_max} is the largest that fits"
    if largest.split == chosen.split:
        headroom = ", but leaves no headroom" if largest.size != feasible_max else ""
        return f"{split_words} has the shortest predicted step; {fit}{headroom}"
    change = largest.step_s / chosen.step_s - 1
    more_or_less = "more" if change > 0 else "less"
    return (
        f"{split_words} is the smallest micro-batch within {1 - KNEE_SHARE:.0%} of the"
        f" shortest predicted step; {largest.split.words(ranks)} would take"
        f" {abs(change):.1%} {more_or_less} time; {fit}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundedPoint:
    """Bounds of the throughput at a micro-batch size, in tokens/s with padding."""

    micro_batch_size: int
    low: float
    high: float


def knee_interval(curve: Sequence[CurvePoint]) -> tuple[int, int] | None:
    """Return bounds of the smallest micro-batch size within 2 % of the best.

    Returns:
        Lower and upper bound; None if the steps of a size show no spread.
    """
    points = _bounded_points(curve)
    if not points:
        return None
    # By the geometric mean of its bounds.
    best = max(points, key=lambda point: point.low * point.high)
    # A size is within 2 % of the best for certain if its lower bound reaches the best's
    # upper bound; it may be if its upper bound reaches the best's lower bound.
    possible = [point for point in points if point.high >= KNEE_SHARE * best.low]
    certain = [point for point in points if point.low >= KNEE_SHARE * best.high]
    # The bounds of the best may be too far apart, but it is as good as itself.
    certain.append(best)
    earliest = min(point.micro_batch_size for point in possible)
    latest = min(point.micro_batch_size for point in certain)
    return earliest, latest


def _bounded_points(curve: Sequence[CurvePoint]) -> list[_BoundedPoint]:
    """Return the points of a curve; none if one of them has no bounds."""
    points = []
    for point in curve:
        low = point.padded_tokens_per_s_low
        high = point.padded_tokens_per_s_high
        if low is None or high is None:
            return []
        points.append(
            _BoundedPoint(micro_batch_size=point.micro_batch_size, low=low, high=high)
        )
    return points
