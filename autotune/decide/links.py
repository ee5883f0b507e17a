"""What a link does, from all-reduces of many sizes: latency and bandwidth with intervals, and who is slow."""

import math
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

    t = 2(k - 1)(a + n/(kB)) with latency a and bandwidth B, by least squares of relative errors, so that small messages count as much as large ones;
    neither is below nothing. Intervals are those of sizes and repeats drawn anew.

    Args:
        times: Bytes and seconds, one pair for each repeat.
        members: Ranks of one node, or nodes with one rank each; two at least.

    Raises:
        ValueError: If there is only one size, so that no line can be told.
    """
    sizes = np.array([size for size, _ in times], dtype=np.float64)
    seconds = np.array([second for _, second in times])
    if len(set(sizes.tolist())) < 2:
        raise ValueError("one size tells no line")
    if members < 2:
        return LinkFit(
            latency_s=Interval(value=0.0, low=None, high=None),
            bytes_per_s=Interval(value=math.inf, low=None, high=None),
            members=members,
            worst_error_share=0.0,
        )
    hops = 2 * (members - 1)
    draw = np.random.default_rng(len(times))
    found = [_line(sizes, seconds)]
    for _ in range(RESAMPLES):
        chosen = draw.integers(0, len(sizes), len(sizes))
        if len(np.unique(sizes[chosen])) > 1:
            found.append(_line(sizes[chosen], seconds[chosen]))
    lines = np.array(found)
    intercept, slope = lines[0]
    fitted = intercept + slope * sizes
    medians = {size: statistics.median(seconds[sizes == size]) for size in set(sizes.tolist())}
    errors = [abs(fitted[sizes == size][0] / median - 1) for size, median in medians.items()]
    # One hop carries 1/k of the bytes.
    return LinkFit(
        latency_s=_interval(lines[:, 0] / hops),
        bytes_per_s=_interval(hops / members / np.maximum(lines[:, 1], 1e-30)),
        members=members,
        worst_error_share=float(max(errors)),
    )


def _line(sizes: Array, seconds: Array) -> tuple[float, float]:
    weights = 1 / seconds
    (a, b), *_ = np.linalg.lstsq(np.stack([weights, sizes * weights], axis=1), np.ones(len(sizes)), rcond=None)
    if a < 0:  # bandwidth alone
        return 0.0, float((sizes * weights).sum() / ((sizes * weights) ** 2).sum())
    if b < 0:
        return float(weights.sum() / (weights**2).sum()), 0.0
    return float(a), float(b)


def _interval(values: Array) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(value=float(values[0]), low=float(low), high=float(high))


def slow_members(rates: Mapping[str, float]) -> dict[str, float]:
    """Who is slow among equals: the name, and its rate over the median of all; two can only be told by both."""
    middle = statistics.median(rates.values())
    return {name: rate / middle for name, rate in rates.items() if rate < SLOW_MEMBER_SHARE * middle}
