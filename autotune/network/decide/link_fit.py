"""Latency and bandwidth of a link with intervals.

They are fitted to all-reduces of many sizes. Slow links and slow ranks are found as
well.
"""

import re
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autotune.base.interval import CONFIDENCE
from autotune.base.units import format_percent
from autotune.evidence.network import LinkEvidence, Scope
from autotune.network.decide.step_model import tree_hops
from autotune.trials.job_figures import LinkFigures

Array = npt.NDArray[np.float64]
LEAST_REPEATS = 3
"""Least number of measurements of a size for an interval."""
LEAST_BYTES = 2**20
"""Least size of messages that determine the bandwidth."""
SLOW_LINK_SHARE = 0.6
"""Share of the interface's nominal speed below which a warning is given."""
SLOW_MEMBER_SHARE = 0.8
"""Share of the fastest link's or the median rank's speed below which a link or a rank
is reported as slow."""


def lost_share(ended_s: Sequence[float], travel_s: float, alone_s: float) -> float:
    """Return the part of its time, 0 to 1, that a device loses to a transfer.

    Args:
        ended_s: Ends of matmuls, all launched with the transfer.
        travel_s: End of the transfer.
        alone_s: Time of one matmul without a transfer.
    """
    done = sum(one_s <= travel_s for one_s in ended_s)
    # Count the current matmul in part; if all ended before, the time ends with the last
    # one.
    began_s = ended_s[done - 1] if done else 0.0
    part = (
        (travel_s - began_s) / (ended_s[done] - began_s) if done < len(ended_s) else 0.0
    )
    seconds = travel_s if done < len(ended_s) else began_s
    return (
        min(1.0, max(0.0, 1 - (done + part) * alone_s / seconds))
        if seconds > 0
        else 0.0
    )


def fit_link(
    times: Sequence[tuple[float, float]],
    members: int,
    scope: Scope = "between nodes",
    *,
    trees: bool = False,
) -> LinkEvidence:
    """Fit latency and bandwidth to all-reduces over a ring of ``members``.

    t = 2(k - 1)(a + n/(kB)) with latency a and bandwidth B. The latency is fitted to
    the smallest message; the bandwidth to messages of at least 1 MiB, the size of DDP's
    smallest bucket, by least squares of relative errors of their medians. Bounds are
    bootstrapped from repeats; they require two repeated sizes of at least 1 MiB.

    Args:
        times: Bytes and seconds of each repeat.
        members: Ranks of one node, or nodes with one rank each.
        scope: Kind of link.
        trees: True if the smallest message may have used a tree, in fewer hops.

    Raises:
        ValueError: If there are fewer than two members or sizes.
    """
    by_size = {
        size: [seconds for other, seconds in times if other == size]
        for size, _ in times
    }
    if len(by_size) < 2 or members < 2:
        raise ValueError(
            f"{len(by_size)} sizes and {members} members are too few to fit a line"
        )
    repeated = {
        size: seconds
        for size, seconds in by_size.items()
        if len(seconds) >= LEAST_REPEATS
    }
    bounded = sum(size >= LEAST_BYTES for size in repeated) > 1
    if bounded:  # sizes without repeats would add noise that the interval does not show
        by_size = repeated
    sizes = np.array(sorted(by_size), dtype=np.float64)
    medians = np.array([statistics.median(by_size[size]) for size in sizes])
    draw = np.random.default_rng(len(times))
    found = [_line(sizes, medians)]
    for _ in range(400 if bounded else 0):
        again = [
            float(np.median(draw.choice(by_size[size], len(by_size[size]))))
            for size in sizes
        ]
        found.append(_line(sizes, np.array(again)))
    starts, slopes = np.array(found).T
    hops = 2 * (members - 1)
    latencies_s = starts / (min(hops, tree_hops(members)) if trees else hops)
    # One hop carries 1/k of the bytes.
    rates = hops / members / np.maximum(slopes, 1e-30)
    ends = (
        {"low": (1 - CONFIDENCE) / 2, "high": (1 + CONFIDENCE) / 2} if bounded else {}
    )
    fitted = {"latency_s": latencies_s, "bytes_per_s": rates}
    bounds = {
        f"{name}_{end}": float(np.quantile(fitted[name], ends[end]))
        for name in fitted
        for end in ends
    }
    return LinkEvidence(
        scope=scope,
        members=members,
        latency_s=float(latencies_s[0]),
        bytes_per_s=float(rates[0]),
        worst_error_share=float(
            np.abs((starts[0] + slopes[0] * sizes) / medians - 1)[_large(sizes)].max()
        ),
        **bounds,
    )


def _line(sizes: Array, seconds: Array) -> tuple[float, float]:
    """Return the intercept, from the smallest size, and the slope, from large ones.

    Sizes are in ascending order. The intercept of the slope's fit is discarded, because
    bursts and start-up costs are not bandwidth.
    """
    large = _large(sizes)
    weights = 1 / seconds[large]
    columns = np.stack([weights, sizes[large] * weights], axis=1)
    (_, slope), *_ = np.linalg.lstsq(columns, np.ones(len(weights)), rcond=None)
    if slope <= 0:  # noise alone
        slope = float(np.median(seconds[large] / sizes[large]))
    return max(0.0, float(seconds[0] - slope * sizes[0])), float(slope)


def _large(sizes: Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the sizes that determine the bandwidth.

    If fewer than two are large, all of them do.
    """
    return sizes >= LEAST_BYTES if (sizes >= LEAST_BYTES).sum() > 1 else sizes > 0


def slow_members(rates: Mapping[str, float]) -> dict[str, float]:
    """Return the slow members of a group of equals.

    Each has its rate over the median of all.
    """
    if not rates:
        return {}
    middle = statistics.median(rates.values())
    return {
        name: rate / middle
        for name, rate in rates.items()
        if rate < SLOW_MEMBER_SHARE * middle
    }


def link_warnings(links: LinkFigures, bytes_per_s: float | None) -> list[str]:
    """Return warnings about slow ranks and links, one sentence each."""
    found = _slow_links(links.neighbours_bytes_per_s)
    ranks, each = (
        {str(rank): rate for rank, rate in enumerate(links.matmul_flops_per_s)},
        links.ranks_per_node,
    )
    for name, share in slow_members(ranks).items():
        where = f"rank {name} (node {int(name) // each}, local rank {int(name) % each})"
        found.append(
            f"{where} runs matmuls at {format_percent(share)} of the median rank's"
            " speed and delays every step"
        )
    nominal = links.interface_bytes_per_s
    if bytes_per_s is not None and nominal and bytes_per_s / nominal < SLOW_LINK_SHARE:
        found.append(
            f"all-reduces reach {format_percent(bytes_per_s / nominal)} of the nominal"
            f" {8 * nominal / 1e9:g} Gbit/s of {links.interface or 'the interface'}:"
            " check for a faster interface, or for other traffic on it"
        )
    return found


def _slow_links(neighbours_bytes_per_s: Sequence[float]) -> list[str]:
    """Return warnings about the links of a ring of nodes, relative to the fastest.

    A slow node slows two of them.
    """
    nodes, fastest = (
        len(neighbours_bytes_per_s),
        max(neighbours_bytes_per_s, default=0.0),
    )
    slow = {
        left
        for left, rate in enumerate(neighbours_bytes_per_s)
        if rate < SLOW_MEMBER_SHARE * fastest
    }
    both = {node for node in range(nodes) if {node, (node - 1) % nodes} <= slow}
    # If two neighbours both qualify, the link between them may be slow; blame a node if
    # a neighbour does not qualify.
    blamed = {
        node for node in both if not {(node - 1) % nodes, (node + 1) % nodes} <= both
    }
    shares = [rate / fastest for rate in neighbours_bytes_per_s]
    speed = "of the fastest one's speed"
    found = [
        f"both links of node {node} have"
        f" {format_percent(max(shares[node], shares[node - 1]))}"
        f" {speed} or less and delay steps"
        for node in sorted(blamed)
    ]
    return found + [
        f"the link between nodes {left} and {(left + 1) % nodes} has"
        f" {format_percent(shares[left])} {speed} and delays steps"
        for left in sorted(slow)
        if not {left, (left + 1) % nodes} & blamed
    ]


_TRANSPORTS = (
    (re.compile(r"NET/IB : Using \[0\](\S+)"), "InfiniBand or RoCE (NCCL NET/IB)"),
    (re.compile(r"NET/Socket : Using \[0\]([^:\s]+)"), "TCP sockets (NCCL NET/Socket)"),
    (re.compile(r"NET/(?!IB|Socket)(\S+) : Using"), "a network plugin of NCCL"),
)


def nccl_transport(log: str) -> tuple[str, str | None] | None:
    """Return NCCL's transport between nodes, and its device.

    ``log`` is a log with ``NCCL_DEBUG=INFO``.

    Returns:
        The transport and its device, or None if the log names no transport.
    """
    found = ((name, pattern.search(log)) for pattern, name in _TRANSPORTS)
    return next(
        ((name, match[1].split(":")[0]) for name, match in found if match is not None),
        None,
    )
