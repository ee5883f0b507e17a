"""Largest size whose need is within a limit, by few evaluations of a curve.

A line through two evaluated sizes leads next to the answer of a nearly straight curve.
Halving and doubling bound the number of evaluations for any other curve. A curve may
cross the limit several times: ``largest_below_gaps`` then finds a lower crossing.
"""

import math
from collections.abc import Callable, Iterator, Mapping

FIRST_SIZE = 32
"""Size that is evaluated first."""
GAP_SHARE = 0.05
"""Share of a size by which smaller ones are looked at for a gap: more than the headroom
that a profile leaves below the largest micro-batch."""


def largest_within(
    need_of: Callable[[int], float], limit: float, *, low: int, top: int
) -> int:
    """Return the largest size whose need is within a limit, in few evaluations.

    Args:
        need_of: Function from a size to its need, called at most once for a size. Few
            evaluations suffice if it grows roughly linearly. If it crosses the limit
            several times, one crossing is found.
        limit: Largest need that is allowed.
        low: Smallest possible answer, which is not evaluated.
        top: Largest size to consider.

    Returns:
        ``low`` if no larger size is found.
    """
    need_by_size: dict[int, float] = {}
    high = top + 1
    size = min(max(FIRST_SIZE, low + 1), top)
    while high - low > 1:
        need_by_size[size] = need_of(size)
        is_within = need_by_size[size] <= limit
        if is_within:
            low = size
        else:
            high = size
        halving = (low + high) // 2
        doubling = 2 * low
        # A line lands next to the answer; halving then closes the rest.
        next_to_evaluate = _size_at_limit(limit, need_by_size)
        if next_to_evaluate is None:
            next_to_evaluate = doubling if is_within else halving
        # Every fourth size ignores the line, so that the number of evaluations stays a
        # multiple of that of halving even if needs are far from any line.
        if len(need_by_size) % 4 == 0:
            next_to_evaluate = doubling if high > top else halving
        size = min(max(next_to_evaluate, low + 1), high - 1)
    return low


def largest_below_gaps(
    need_of: Callable[[int], float], limit: float, *, top: int
) -> int:
    """Return a size within a limit, like all sizes that were looked at below it.

    A need may fall where sizes grow: a caching allocator wastes less where blocks
    happen to fit into freed ones. Sizes just below such a fall exceed the limit, while
    larger ones are within it. A user who takes a rounder number than the largest size,
    or leaves some headroom, may then run out of memory. So the answer is below such
    gaps.

    Args:
        need_of: Function from a size to its need.
        limit: Largest need that is allowed.
        top: Largest size to consider.

    Returns:
        0 if no size is found.
    """
    largest = largest_within(need_of, limit, low=0, top=top)
    while True:
        too_large = next(
            (size for size in _sizes_below(largest) if need_of(size) > limit), None
        )
        if too_large is None:
            return largest
        largest = largest_within(need_of, limit, low=0, top=too_large - 1)


def _sizes_below(size: int) -> Iterator[int]:
    """Yield sizes at doubling distances below a size, up to ``GAP_SHARE`` of it."""
    distance = 1
    while distance <= GAP_SHARE * size:
        yield size - distance
        distance *= 2


def _size_at_limit(limit: float, need_by_size: Mapping[int, float]) -> int | None:
    """Return the size at which a line through two evaluated sizes meets a limit.

    The two sizes are those whose needs are nearest to the limit.

    Returns:
        None if there are not yet two sizes, or their needs are equal or so close that
        the line does not meet the limit at any size that a float can hold.
    """
    if len(need_by_size) < 2:
        return None
    nearest = sorted(need_by_size, key=lambda size: abs(need_by_size[size] - limit))
    first, second = nearest[:2]
    slope = (need_by_size[first] - need_by_size[second]) / (first - second)
    if slope == 0:
        return None
    distance = (limit - need_by_size[first]) // slope
    if not math.isfinite(distance):
        return None
    return first + int(distance)
