"""What a link does, from all-reduces of many sizes: latency and bandwidth with intervals, and who is slow."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.core.network import Link
from autotune.decide.resampling import CONFIDENCE
from autotune.decide.statistics import Interval

Array = npt.NDArray[np.float64]
RESAMPLES = 400
SLOW_LINK_SHARE = 0.6
"""Of the speed that the interface names; below, people are warned."""
SLOW_MEMBER_SHARE = 0.8
"""Of the median of its kind; below, a link or a rank is named as slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A link as fitted; ``members`` went round the ring."""

    latency_s: Interval
    """Of one hop."""
    bytes_per_s: Interval
    members: int
    worst_error_share: float
    """Of the fit at any size: what a straight line does not tell."""

    @property
    def link(self) -> Link:
        """Its middle."""
        return Link(latency_s=self.latency_s.value, bytes_per_s=self.bytes_per_s.value)


def fit_link(times: Sequence[tuple[float, float]], members: int) -> LinkFit:
    """Fit latency and bandwidth to all-reduces of a ring of so many.

    t = 2(k - 1)(a + n/(kB)) with latency a and bandwidth B, through each size's median, by least squares of relative
    errors, so that small messages count as much as large ones; neither is below nothing. Intervals are those of repeats
    drawn anew, size by size.

    Args:
        times: Bytes and seconds, one pair for each repeat.
        members: Ranks of one node, or nodes with one rank each; two at least.

    Raises:
        ValueError: If there are fewer than two members or sizes: no line can be told.
    """
    by_size: dict[float, list[float]] = {}
    for size, second in times:
        by_size.setdefault(size, []).append(second)
    if len(by_size) < 2 or members < 2:
        raise ValueError(f"{len(by_size)} sizes and {members} members tell no line")
    sizes = np.array(sorted(by_size), dtype=np.float64)
    medians = np.array([statistics.median(by_size[size]) for size in sizes])
    draw = np.random.default_rng(len(times))
    found = [_line(sizes, medians)]
    for _ in range(RESAMPLES):
        again = [float(np.median(draw.choice(by_size[size], len(by_size[size])))) for size in sizes]
        found.append(_line(sizes, np.array(again)))
    lines = np.array(found)
    hops = 2 * (members - 1)
    fitted = lines[0, 0] + lines[0, 1] * sizes
    # One hop carries 1/k of the bytes.
    return LinkFit(
        latency_s=_interval(lines[:, 0] / hops),
        bytes_per_s=_interval(hops / members / np.maximum(lines[:, 1], 1e-30)),
        members=members,
        worst_error_share=float(np.abs(fitted / medians - 1).max()),
    )


def _line(sizes: Array, seconds: Array) -> tuple[float, float]:
    """Intercept and slope of the line of least relative errors, neither below 0."""
    weights = 1 / seconds
    (intercept, slope), *_ = np.linalg.lstsq(
        np.stack([weights, sizes * weights], axis=1), np.ones(len(sizes)), rcond=None
    )
    if intercept < 0:  # bandwidth alone
        return 0.0, float((sizes * weights).sum() / ((sizes * weights) ** 2).sum())
    if slope < 0:
        return float(weights.sum() / (weights**2).sum()), 0.0
    return float(intercept), float(slope)


def _interval(values: Array) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(value=float(values[0]), low=float(low), high=float(high))


def slow_members(rates: Mapping[str, float]) -> dict[str, float]:
    """Who is slow among equals: the name, and its rate over the median of all; two can only be told by both."""
    middle = statistics.median(rates.values())
    return {name: rate / middle for name, rate in rates.items() if rate < SLOW_MEMBER_SHARE * middle}
