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
    largest = points[-1].micro_batch_size
    # A rank has at least one sequence.
    global_batch_size = max(global_batch_size, ranks)
    splits = {
        size: split_global_batch(global_batch_size, size, ranks)
        for size in sizes or [point.micro_batch_size for point in points]
        if size <= largest
    }
    step_s = {size: _step_s(points, split) for size, split in splits.items()}
    shortest_s = min(step_s.values())
    chosen = min(size for size in step_s if step_s[size] * KNEE_SHARE <= shortest_s)
    split = splits[chosen]
    if split.gradient_accumulation_steps == 1:
        per_rank = " per rank" if ranks > 1 else ""
        return MicroBatchChoice(
            micro_batch_size=chosen,
            reason=(
                f"{feasible_max} fit; your global batch needs"
                f" {split.micro_batch_size}{per_rank}"
            ),
        )
    split_words = f"{split.words(ranks)} ({SPLIT_FACTORS})"
    fit = f"{feasible_max} is the largest that fits"
    largest_split = split_global_batch(global_batch_size, largest, ranks)
    if largest_split == split:
        headroom = "" if largest == feasible_max else ", but leaves no headroom"
        return MicroBatchChoice(
            micro_batch_size=chosen,
            reason=f"{split_words} has the shortest predicted step; {fit}{headroom}",
        )
    change = _step_s(points, largest_split) / step_s[chosen] - 1
    more_or_less = "more" if change > 0 else "less"
    return MicroBatchChoice(
        micro_batch_size=chosen,
        reason=(
            f"{split_words} is the smallest micro-batch within {1 - KNEE_SHARE:.0%} of"
            f" the shortest predicted step; {largest_split.words(ranks)} would take"
            f" {abs(change):.1%} {more_or_less} time; {fit}"
        ),
    )


def _step_s(points: Sequence[CurvePoint], split: "GlobalBatchSplit") -> float:
    """Return the predicted time of an optimizer step, interpolated between points.

    It is in seconds per position of a sequence, so that it only compares splits.
    """
    sizes = [point.micro_batch_size for point in points]
    micro_batches_s = [
        point.micro_batch_size / point.padded_tokens_per_s for point in points
    ]
    micro_batch_s = np.interp(split.micro_batch_size, sizes, micro_batches_s)
    return split.gradient_accumulation_steps * float(micro_batch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundedPoint:
    """Bounds of the throughput at a micro-batch size."""

    micro_batch_size: int
    low: float
    high: float


def knee_interval(curve: Sequence[CurvePoint]) -> tuple[int, int] | None:
    """Return bounds of the smallest micro-batch size within 2 % of the best.

    Returns:
        None if the steps of a size show no spread.
    """
    points = []
    for point in curve:
        low = point.padded_tokens_per_s_low
        high = point.padded_tokens_per_s_high
        if low is None or high is None:
            return None
        points.append(
            _BoundedPoint(micro_batch_size=point.micro_batch_size, low=low, high=high)
        )
    if not points:
        return None
    # By the geometric mean of its bounds.
    best = max(points, key=lambda point: point.low * point.high)
    earliest = min(
        point.micro_batch_size
        for point in points
        if point.high >= KNEE_SHARE * best.low
    )
    latest = min(
        point.micro_batch_size
        for point in points
        if point.low >= KNEE_SHARE * best.high or point is best
    )
    return earliest, latest
