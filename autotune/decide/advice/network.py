"""Advice on ranks and nodes: the paper's fourth recommendation, and where it ends."""

import math
import statistics
from collections import Counter

from autotune.core.advice import Advice, Change, Figure, Gain
from autotune.core.evidence import ExchangeRow
from autotune.core.interval import CONFIDENCE, Interval
from autotune.core.trial import LinkFigures
from autotune.decide.advice.gains import times, without
from autotune.decide.advice.situation import PERSISTENT_SHARE, Situation, on_host, part_figure
from autotune.decide.bottleneck import MATTERS_SHARE, rows_of_this_start
from autotune.decide.links import slow_members

WORTH_RATIO = 1.02
SLOW_RATIO = 1.1
MARGIN = 2.0
"""Times T_min: a planning margin, no theorem."""


def exchange(now: Situation) -> Advice | None:
    """A faster way to exchange gradients was measured, and is not what the profile has."""
    network = now.network
    if now.train is None or network is None:
        return None
    proven = [row for row in network.exchanges if row.gradient_dtype == "fp32" and (row.ratio_low or 0.0) > 1]
    best = max(proven, key=lambda row: row.ratio_to_default or 0.0, default=None)
    mine = next((row for row in network.exchanges if _is(now, row)), None)
    if best is None or mine is None or mine is best or best.ratio_to_default is None:
        return None
    of_default = mine.ratio_to_default or 1.0  # the default has no ratio to itself
    ratio = best.ratio_to_default / of_default
    if ratio < WORTH_RATIO:
        return None
    parallel = now.train.parallel
    wanted = {
        "parallel.strategy": (parallel.strategy, best.strategy),
        "parallel.bucket_cap_mib": (parallel.bucket_cap_mib, best.bucket_cap_mib),
        "parallel.shard_ranks": (parallel.shard_ranks, best.shard_ranks),
    }
    exact = best.ratio if mine.ratio_to_default is None else None
    return Advice(
        rule="exchange",
        severity="should",
        claim=f"gradients travel faster with {best.strategy} and buckets of {best.bucket_cap_mib} MiB",
        evidence=(_exchange_figure(mine, "as it is"), _exchange_figure(best, "best that is proven")),
        gain=Gain.of_rates(exact or Interval(value=ratio)),
        cost="none that was seen; the sums of gradients are rounded in another order",
        changes=tuple(Change(key=key, old=old, new=new) for key, (old, new) in wanted.items() if old != new),
        would_change="another network, or another number of nodes",
        safe=best.strategy == parallel.strategy,
    )  # fmt: skip


def network_bound(now: Situation) -> Advice | None:
    """Ranks wait for gradients, and nobody has measured what would help."""
    waits = now.loss("network", MATTERS_SHARE)
    if now.train is None or waits is None or now.bottleneck is None:
        return None
    if now.network is not None and now.network.exchanges and now.run is None:
        return None
    return Advice(
        rule="network-bound",
        severity="should",
        claim=f"{waits.share:.0%} of the step waits for gradients",
        evidence=(part_figure(waits, "waiting for gradients", now.bottleneck.steps),),
        gain=without(waits, left=0.5, left_low=0.25, left_high=1.0),
        cost="a quarter of an hour on two nodes; 16-bit gradients, if it comes to them, change the recipe, and are "
        "held to an equal loss first",
        command=now.command("network", "--profile", now.profile_path, *(("--slurm",) if now.nodes > 1 else ())),
        would_change="a larger global batch, which exchanges more seldom and is another recipe",
    )


def too_many_nodes(now: Situation) -> Advice | None:
    """More nodes than this global batch keeps busy."""
    spread = now.spread
    if spread is None or spread.nodes <= spread.useful_nodes:
        return None
    low, high = spread.efficiency_low, spread.efficiency_high
    confidence = None if low is None else CONFIDENCE  # of the links
    return Advice(
        rule="too-many-nodes",
        severity="should",
        claim=f"on {spread.nodes} nodes this global batch trains at {spread.efficiency:.0%} of what they could; "
        f"{spread.useful_nodes} are the most that reach 90 %",
        evidence=(
            Figure(
                name=f"efficiency of {spread.nodes} nodes", value=spread.efficiency, unit="share", low=low, high=high,
                confidence=confidence, known="predicted", source=spread.source,
            ),
            Figure(
                name=f"efficiency of {spread.useful_nodes} nodes", value=spread.useful_efficiency, unit="share",
                known="predicted", source=spread.source,
            ),
        ),
        gain=Gain(
            of="GPU-hours", ratio=spread.efficiency / spread.useful_efficiency,
            low=None if low is None else low / spread.useful_efficiency,
            high=None if high is None else high / spread.useful_efficiency, confidence=confidence, known="predicted",
        ),
        cost="the run takes longer on fewer nodes, and costs less",
        command=now.command("scale", "--profile", now.profile_path, "--nodes", f"{spread.useful_nodes},{spread.nodes}"),
        would_change="a deadline that is worth the GPU-hours, a faster network, or a larger global batch",
    )  # fmt: skip


def below_t_min(now: Situation) -> Advice | None:
    """Too few tokens to a rank and step for its computing to hide the exchange."""
    spread = now.spread
    if spread is None or spread.nodes == 1 or spread.twice_the_batch_efficiency is None:
        return None
    wanted = MARGIN * spread.least_tokens_per_rank
    gain = spread.twice_the_batch_efficiency / spread.efficiency
    if spread.tokens_per_rank >= wanted or gain < WORTH_RATIO:
        return None
    return Advice(
        rule="below-t-min",
        severity="could",
        claim=f"each rank has {spread.tokens_per_rank:,.0f} real tokens of a step on {spread.nodes} nodes, and needs "
        f"about {wanted:,.0f} (twice T_min) to compute while gradients travel",
        evidence=(
            Figure(
                name="T_min", value=spread.least_tokens_per_rank, unit="tokens", known="predicted", source=spread.source
            ),
            Figure(
                name="efficiency with twice the global batch", value=spread.twice_the_batch_efficiency, unit="share",
                known="predicted", source=spread.source,
            ),
        ),
        gain=Gain(of="real tokens/s", ratio=gain, known="predicted"),
        cost="a change of recipe: twice the global batch, the learning rate times 1.41 (Adam goes with the root), as "
        "much warm-up in tokens, half the steps; only below the gradient noise scale, which runs report",
        command=now.command("scale", "--profile", now.profile_path, "--nodes", str(spread.nodes)),
        would_change="16-bit gradients or a faster network, which halve T_min; fewer nodes",
    )  # fmt: skip


def slow_rank(now: Situation) -> Advice | None:
    """One rank that all others wait for, step after step."""
    rows = [row for row in rows_of_this_start(now.run) if row.slowest_rank is not None] if now.run is not None else []
    if len(rows) < 4 or now.run is None:
        return _slow_products(now)
    (rank, times), *_ = Counter(row.slowest_rank for row in rows).most_common(1)
    ratio = statistics.median(row.slowest_rank_ratio or 1.0 for row in rows if row.slowest_rank == rank)
    lost = now.loss("straggler", 0.02)
    if times < PERSISTENT_SHARE * len(rows) or ratio < SLOW_RATIO or lost is None:
        return None
    where = on_host(now.run.header.hosts, rank)
    return Advice(
        rule="slow-rank",
        severity="should",
        claim=f"rank {rank}{where} computes {ratio:.2f} times as long as the median rank, and every step waits for it",
        evidence=(
            part_figure(lost, "waiting for it", len(rows)),
            Figure(
                name="its time, of the median rank's", value=ratio, unit="ratio", n=times,
                source=f"run {now.run.directory.name}",
            ),
        ),
        gain=without(lost),
        cost="another node in its place: SLURM takes a list of nodes to leave out in the site file; look at that "
        "rank's node first, for heat, a power cap, or neighbours",
        command="autotune doctor",
        would_change="rows that are harder by chance, if it is not the same rank in the next run",
    )  # fmt: skip


def uneven_ranks(now: Situation) -> Advice | None:
    """All ranks wait for one, and it is another one every time."""
    lost = now.loss("straggler", MATTERS_SHARE)
    if now.run is None or now.train is None or lost is None or slow_rank(now) is not None:
        return None
    packed = now.train.layout == "packed"
    changes = () if packed or not now.knows_the_model else (Change(key="layout", old=now.train.layout, new="packed"),)
    return Advice(
        rule="uneven-ranks",
        severity="could",
        claim=f"{lost.share:.0%} of the step all ranks wait for one that takes longer, each time another one",
        evidence=(part_figure(lost, "waiting for it", len(now.run.steps)),),
        gain=times(without(lost, left=0.1, left_low=0.0, left_high=1.0), (1.0, 1.05, 1.2)),
        cost="packed rows are all alike, and hold no padding; the micro-batch is to be probed again" if changes else
        "nothing is known to: look at what else runs on the nodes, and at saves and logs on shared disks",
        changes=changes,
        command=now.probe_command(layout="packed") if changes else "autotune doctor",
        would_change="more micro-batches to a step: chance evens out in them",
    )  # fmt: skip


def _slow_products(now: Situation) -> Advice | None:
    """The same before any run: from products that all ranks computed at once."""
    rates = now.network.products_flops_per_s if now.network is not None else []
    slow = slow_members({str(rank): rate for rank, rate in enumerate(rates)})
    if len(rates) < 3 or not slow:
        return None
    rank, share = min(slow.items(), key=lambda one: one[1])
    return Advice(
        rule="slow-rank",
        severity="should",
        claim=f"rank {rank} multiplies at {share:.0%} of the median rank's speed, and every step would wait for it",
        evidence=(Figure(name="its speed, of the median", value=share, unit="ratio", n=len(rates), source="links"),),
        gain=Gain(of="real tokens/s", ratio=1 / share, low=1.0, high=1 / share, known="predicted"),
        cost="another node in its place: SLURM takes a list of nodes to leave out in the site file",
        command="autotune doctor",
        would_change="a step that does not compute most of its time",
    )


def slow_link(now: Situation) -> Advice | None:
    """One link that all messages pass, slower than its neighbours."""
    links = [
        LinkFigures.of(trial.outcome)
        for trial in now.trials
        if trial.trial.job == "links" and trial.outcome.kind == "measured"
    ]
    if not links or len(links[-1].neighbours_bytes_per_s) < 3:
        return None
    count = len(links[-1].neighbours_bytes_per_s)
    rates = {f"{left} to {(left + 1) % count}": rate for left, rate in enumerate(links[-1].neighbours_bytes_per_s)}
    fastest = max(rates.values())
    slow = slow_members(rates)
    if not slow:
        return None
    name = min(slow, key=lambda one: slow[one])
    share = rates[name] / fastest
    waits = now.bottleneck.part("network") if now.bottleneck is not None else None
    return Advice(
        rule="slow-link",
        severity="should",
        claim=f"the link from node {name} has {share:.0%} of the fastest one's speed, and every exchange passes it",
        evidence=(
            Figure(
                name="its speed, of the fastest", value=share, unit="ratio", n=len(rates), source="autotune network"
            ),
        ),
        # A ring is as fast as its slowest link, so the wait for gradients shrinks as the travelling does, or more.
        gain=None if waits is None else without(waits, left=share, left_low=share / 2, left_high=1.0),
        cost="another node in its place: SLURM takes a list of nodes to leave out in the site file",
        command=now.command("network", "--profile", now.profile_path, *(("--slurm",) if now.nodes > 1 else ())),
        would_change="traffic of others at that moment: measure again before a node is left out for good",
    )


def _is(now: Situation, row: ExchangeRow) -> bool:
    assert now.train is not None
    parallel = now.train.parallel
    return (row.strategy, row.bucket_cap_mib, row.shard_ranks, row.gradient_dtype) == (
        parallel.strategy, parallel.bucket_cap_mib, parallel.shard_ranks, parallel.gradient_dtype,
    )  # fmt: skip


def _exchange_figure(row: ExchangeRow, name: str) -> Figure:
    return Figure(
        name=f"{name}: {row.strategy}, {row.bucket_cap_mib} MiB buckets, {row.micro_batches} times {row.rows} rows",
        value=row.real_tokens_per_s or math.nan, unit="tokens/s", n=row.steps, source="autotune network",
    )  # fmt: skip
