"""Statistics of steps that depend on their neighbours. Pure.

The spread of a figure is that of its means over blocks of steps that hardly depend on
each other (Law, Simulation Modeling and Analysis, 5th ed., ch. 9.5). How long steps
stay correlated follows from their autocorrelation, whose bias is removed (Kendall,
Biometrika 41, 1954).
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from autotune.base.estimates import Estimate, Scale, exp_without_overflow
from autotune.base.interval import SHOWN_CONFIDENCE, Interval

Value = TypeVar("Value")

MIN_BLOCKS = 4
"""Fewest blocks whose means show a useful spread."""
MAX_BLOCKS = 16
"""Most blocks: longer blocks depend less on each other, and more degrees of freedom
hardly narrow the bounds."""
_CORRELATION_TIMES_PER_BLOCK = 4
"""Minimum length of a block, in multiples of how long steps stay correlated."""
_HIGHEST_CORRELATION = 0.99
"""Upper limit of the autocorrelation, so that a block has a finite length."""
_STILL_CORRELATED = 0.2
"""Autocorrelation above which neighbouring blocks are merged in pairs."""


def estimate_plausible_steps(
    pairs: Sequence[tuple[float, float]], *, scale: Scale = "log"
) -> Estimate | None:
    """Return ``estimate_steps`` of the plausible pairs in an untrusted file.

    Args:
        pairs: Amount and size of each step.
        scale: Scale of comparison.

    Returns:
        The estimate, or None if no pair is plausible.
    """
    amounts: list[float] = []
    sizes: list[float] = []
    for amount, size in pairs:
        is_finite = math.isfinite(amount) and math.isfinite(size)
        if is_finite and size > 0 and (amount > 0 or scale == "linear"):
            amounts.append(amount)
            sizes.append(size)
    return estimate_steps(amounts, sizes, scale=scale) if amounts else None


def estimate_steps(
    amounts: Sequence[float], sizes: Sequence[float], *, scale: Scale = "log"
) -> Estimate:
    """Return the sum of all amounts over the sum of all sizes, with its variance.

    The steps may depend on their neighbours. The variance leaves out variation that is
    slower than the whole series.

    Args:
        amounts: Amount of each step, such as its tokens; positive on the ``log`` scale.
        sizes: Size of each step, such as its seconds; positive.
        scale: Scale of comparison.
    """
    value = sum(amounts) / sum(sizes)
    rates = [amount / size for amount, size in zip(amounts, sizes, strict=True)]
    points = [math.log(rate) for rate in rates] if scale == "log" else rates
    count = block_count(points)
    blocks = zip(split_blocks(amounts, count), split_blocks(sizes, count), strict=True)
    means = [
        sum(block_amounts) / sum(block_sizes) for block_amounts, block_sizes in blocks
    ]
    return estimate_blocks(value, means, scale=scale, n=len(rates))


def estimate_blocks(
    value: float, means: Sequence[float], *, scale: Scale = "linear", n: int
) -> Estimate:
    """Return a figure of ``n`` steps, with the variance of its means over blocks.

    With fewer than two blocks, the figure has no variance.
    """
    if len(means) < 2:
        return Estimate(
            value=value,
            n=n,
            scale=scale,
            reason_without_variance="too few steps for how slowly they vary",
        )
    points = [math.log(mean) for mean in means] if scale == "log" else means
    variance = statistics.variance(points) / len(points)
    return Estimate(
        value=value,
        n=n,
        scale=scale,
        variance=variance,
        degrees_of_freedom=len(points) - 1,
    )


def block_count(points: Sequence[float]) -> int:
    """Return how many blocks to cut a series into.

    Returns:
        The number of blocks, or 0 if the series is too short for how long steps stay
        correlated.
    """
    count = min(MAX_BLOCKS, len(points) // _min_block_length(points))
    # The autocorrelation of neighbouring steps misses slow variation, which shows in
    # that of neighbouring blocks.
    while count >= 2 * MIN_BLOCKS:
        means = [statistics.fmean(block) for block in split_blocks(points, count)]
        if _autocorrelation(means) <= _STILL_CORRELATED:
            break
        count //= 2
    return count if count >= MIN_BLOCKS else 0


def _min_block_length(points: Sequence[float]) -> int:
    """Return the fewest steps of a block that hardly depends on the next one."""
    correlation = min(max(_autocorrelation(points), 0.0), _HIGHEST_CORRELATION)
    if correlation > 0:
        # The time after which a series forgets, if each step depends on the last only.
        correlated_steps = (1 + correlation) / (1 - correlation)
        return max(1, math.ceil(_CORRELATION_TIMES_PER_BLOCK * correlated_steps))
    return 1


def split_blocks(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """Return consecutive blocks whose lengths differ by at most one."""
    if count == 0:
        return []
    ends = [len(values) * number // count for number in range(count + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]


def _autocorrelation(points: Sequence[float]) -> float:
    """Return the autocorrelation of neighbours, corrected for its bias towards less.

    It is 0 if nothing varies.
    """
    n = len(points)
    mean = statistics.fmean(points)
    deviations = [point - mean for point in points]
    total = sum(deviation * deviation for deviation in deviations)
    if n < 3 or total <= 0:
        return 0.0
    products = (first * second for first, second in itertools.pairwise(deviations))
    correlation = sum(products) / total
    # Kendall's bias, to the first order in 1 / n.
    return correlation + (1 + 4 * correlation) / n


def paired_change(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the change from A to B, positive figures of the same steps.

    Returns:
        The ratio B / A with 95 % bounds, which are None if there are too few steps.
    """
    log_ratios = [math.log(second / first) for first, second in zip(a, b, strict=True)]
    estimate = estimate_steps(log_ratios, [1.0] * len(log_ratios), scale="linear")
    # The mean of logarithms is that of a ratio on the other scale.
    ratio = replace(estimate, value=exp_without_overflow(estimate.value), scale="log")
    return ratio.interval_of_comparison(SHOWN_CONFIDENCE)
