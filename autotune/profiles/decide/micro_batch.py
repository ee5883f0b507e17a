"""Choice of the micro-batch size by the time of an optimizer step. Pure."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.evidence.probe import CurvePoint
from autotune.profiles.decide.batch_split import (
    SPLIT_FACTORS,
    GlobalBatchSplit,
    split_global_batch,
)

KNEE_SHARE = 0.98
"""Share of the best throughput from which on a micro-batch size is as good as the
best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChoice:
    """Micro-batch size to train with, and why it is not the largest that fits."""

    micro_batch_size: int
    reason: str
    """Reason in words, as the profile records it."""


def with_headroom(feasible_max: int, headroom_share: float) -> int:
    """Return the largest micro-batch size that leaves the headroom free; at least 1.

    Args:
        feasible_max: Largest micro-batch size that fits.
        headroom_share: Share of this size to leave unused, 0 to 1.
    """
    return max(1, math.floor(feasible_max * (1 - headroom_share)))


def curve_sizes(largest_size: int, split_size: int) -> list[int]:
    """Return the micro-batch sizes at which throughput is measured, by their value.

    The first one is the size with which training splits its global batch. Then come an
    eighth, a quarter and a half of the largest size, this size itself, and the powers
    of two below its eighth.

    Args:
        largest_size: Largest micro-batch size that leaves the headroom free.
        split_size: Micro-batch size into which the largest one splits the global batch.
    """
    eighth = largest_size // 8
    shares = [eighth, largest_size // 4, largest_size // 2]
    powers = [2**exponent for exponent in range(eighth.bit_length())]
    sizes = [split_size, *shares, largest_size, *reversed(powers)]
    # Each size once, at its first place.
    return [size for size in dict.fromkeys(sizes) if size > 0]


def choose_micro_batch(
    curve: Sequence[CurvePoint],
    feasible_max: int,
    *,
    global_batch_size: int,
    ranks: int,
    interpolated: bool = False,
) -> MicroBatchChoice:
    """Return the smallest micro-batch size within 2 % of the shortest optimizer step.

    The time of a step is predicted: it is the number of micro-batches that hold the
    global batch, times the time of a micro-batch on the curve. Empty sequences take
    time as well: 65 sequences need 8 micro-batches of 9, or 13 of 5.

    Args:
        curve: Measured throughput by micro-batch size, at least one point; its largest
            size leaves the headroom free.
        feasible_max: Largest micro-batch size that fits.
        global_batch_size: Sequences of an optimizer step over all ranks.
        ranks: Ranks that train together.
        interpolated: True to choose from all sizes up to the largest of the curve, with
            times between its points interpolated. False chooses only from splits whose
            micro-batches were measured, if there are any.
    """
    # A rank has at least one sequence.
    global_batch_size = max(global_batch_size, ranks)
    points = sorted(curve, key=lambda point: point.size)
    steps = _predicted_steps(points, global_batch_size, ranks)
    if not interpolated:
        measured_sizes = {point.size for point in points}
        steps = _measured_steps(steps, measured_sizes) or [
            step for step in steps if step.size in measured_sizes
        ]
    shortest_time = min(step.relative_time for step in steps)
    good_steps = [
        step for step in steps if step.relative_time * KNEE_SHARE <= shortest_time
    ]
    # Of these, the smallest micro-batch leaves the most memory free.
    chosen = min(good_steps, key=lambda step: step.size)
    largest_size = points[-1].size
    largest = _predicted_step(points, largest_size, global_batch_size, ranks)
    return MicroBatchChoice(
        micro_batch_size=chosen.split.micro_batch_size,
        reason=_reason_of_choice(chosen, largest, feasible_max, ranks),
    )


def choose_by_throughput(
    curve: Sequence[CurvePoint],
    feasible_max: int,
    *,
    in_words: Callable[[int], str],
) -> MicroBatchChoice:
    """Return the largest measured size, unless a smaller one is clearly faster.

    This is for subjects whose global batch follows from the size.

    Args:
        curve: Measured throughput by size, at least one point; its largest size leaves
            the headroom free.
        feasible_max: Largest size that fits.
        in_words: Returns a size in words.
    """
    largest = max(curve, key=lambda point: point.size)
    fastest = max(curve, key=lambda point: point.units_per_s)
    ratio = fastest.units_per_s / largest.units_per_s
    if ratio * KNEE_SHARE <= 1 or _overlap(fastest, largest):
        headroom = ""
        if largest.size < feasible_max:
            headroom = ", less the headroom"
        return MicroBatchChoice(
            micro_batch_size=largest.size,
            reason=f"the largest that fits, {feasible_max}{headroom}",
        )
    good = [
        point
        for point in curve
        if point.units_per_s >= KNEE_SHARE * fastest.units_per_s
    ]
    chosen = min(good, key=lambda point: point.size)
    return MicroBatchChoice(
        micro_batch_size=chosen.size,
        reason=(
            f"{in_words(chosen.size)} is the smallest within"
            f" {1 - KNEE_SHARE:.0%} of the best throughput;"
            f" {in_words(largest.size)} would have {1 / ratio:.2f} times as"
            f" much; {feasible_max} is the largest that fits"
        ),
    )


def _overlap(faster: CurvePoint, slower: CurvePoint) -> bool:
    """Return whether noise may explain that one point is faster than another."""
    low = faster.rate.low
    high = slower.rate.high
    return low is not None and high is not None and high >= low


def measured_splits(
    curve: Sequence[CurvePoint], *, global_batch_size: int, ranks: int
) -> list["PredictedStep"]:
    """Predict the steps whose micro-batches were measured; none without a curve.

    Args:
        curve: As for ``choose_micro_batch``, but it may be empty.
        global_batch_size: Sequences of an optimizer step over all ranks.
        ranks: Ranks that train together.
    """
    if not curve:
        return []
    points = sorted(curve, key=lambda point: point.size)
    steps = _predicted_steps(points, max(global_batch_size, ranks), ranks)
    return _measured_steps(steps, {point.size for point in points})


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """Optimizer step with micro-batches of at most a given size."""

    size: int
    """Largest micro-batch size of the step; an even split may need a smaller one."""
    split: GlobalBatchSplit
    relative_time: float
    """Predicted seconds of the step, divided by the positions of a sequence.

    All steps have sequences of the same length, so that it compares them.
    """


def _predicted_step(
    points: Sequence[CurvePoint], size: int, global_batch_size: int, ranks: int
) -> PredictedStep:
    """Predict an optimizer step, its micro-batches interpolated between points.

    Args:
        points: Measured throughput, in ascending order of the micro-batch size.
        size: Largest micro-batch size of the step.
        global_batch_size: Sequences of the step over all ranks.
        ranks: Ranks that train together.
    """
    split = split_global_batch(global_batch_size, size, ranks)
    measured_sizes = [point.size for point in points]
    # Sequences over positions per second: seconds, divided by positions of a sequence.
    measured_times = [point.size / point.units_per_s for point in points]
    micro_batch_time = np.interp(split.micro_batch_size, measured_sizes, measured_times)
    return PredictedStep(
        size=size,
        split=split,
        relative_time=split.gradient_accumulation_steps * float(micro_batch_time),
    )


def _predicted_steps(
    points: Sequence[CurvePoint], global_batch_size: int, ranks: int
) -> list[PredictedStep]:
    """Predict the steps of all sizes up to the largest of the curve."""
    return [
        _predicted_step(points, size, global_batch_size, ranks)
        for size in range(1, points[-1].size + 1)
    ]


def _measured_steps(
    steps: Sequence[PredictedStep], measured_sizes: Collection[int]
) -> list[PredictedStep]:
    """Return the steps whose micro-batches were measured."""
    return [step for step in steps if step.split.micro_batch_size in measured_sizes]


def _reason_of_choice(
    chosen: PredictedStep, largest: PredictedStep, feasible_max: int, ranks: int
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
    change = largest.relative_time / chosen.relative_time - 1
    more_or_less = "more" if change > 0 else "less"
    return (
        f"{split_words} is the smallest micro-batch within {1 - KNEE_SHARE:.0%} of the"
        f" shortest predicted step; {largest.split.words(ranks)} would take"
        f" {abs(change):.1%} {more_or_less} time; {fit}"
    )
