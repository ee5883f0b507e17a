"""Knee of a throughput curve: larger micro-batches hardly add speed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.evidence.probe import CurvePoint
from autotune.profiles.decide.micro_batch import KNEE_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundedPoint:
    """Bounds of the throughput at a micro-batch size."""

    micro_batch_size: int
    low: float
    """Lower bound, in tokens/s including padding."""
    high: float
    """Upper bound, in tokens/s including padding."""


def knee_interval(curve: Sequence[CurvePoint]) -> tuple[int, int] | None:
    """Return bounds of the smallest micro-batch size within 2 % of the best throughput.

    Args:
        curve: Measured throughput by micro-batch size.

    Returns:
        Lower and upper bound, in sequences; None if the curve is empty, or a point of
        it has no bounds.
    """
    points = _bounded_points(curve)
    if not points:
        return None
    # The best has the largest geometric mean of its bounds, which are those of a
    # logarithm; the order of the products is the same.
    best = max(points, key=lambda point: point.low * point.high)
    # A size is within 2 % of the best for certain if its lower bound reaches the best's
    # upper bound; it may be if its upper bound reaches the best's lower bound.
    possible = [point for point in points if point.high >= KNEE_SHARE * best.low]
    certain = [point for point in points if point.low >= KNEE_SHARE * best.high]
    # The best is as good as itself, even if its own bounds are more than 2 % apart.
    certain.append(best)
    earliest = min(point.micro_batch_size for point in possible)
    latest = min(point.micro_batch_size for point in certain)
    return earliest, latest


def _bounded_points(curve: Sequence[CurvePoint]) -> list[_BoundedPoint]:
    """Return the points of a curve; none if one of them has no bounds."""
    points = []
    for point in curve:
        low = point.units_per_s_low
        high = point.units_per_s_high
        if low is None or high is None:
            return []
        points.append(_BoundedPoint(micro_batch_size=point.size, low=low, high=high))
    return points
