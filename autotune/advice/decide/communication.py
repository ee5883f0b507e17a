"""Advice on ranks and nodes: the paper's fourth recommendation, and its limits."""

import math
import statistics
from collections import Counter

from autotune.advice.decide.bottleneck import MATTERS_SHARE, steps_of_this_start
from autotune.advice.decide.context import PERSISTENT_SHARE, TrainingContext, on_host, times, without
from autotune.advice.values import Advice, EvidenceFigure, Gain, SettingChange, figure
from autotune.base.interval import Interval
from autotune.network.decide.link_fit import slow_members
from autotune.network.values import GradientSyncRow
from autotune.trials.values import LinkFigures

WORTH_RATIO = 1.02
_OF_EXCHANGE = ("strategy", "bucket_cap_mib", "shard_ranks")
_OTHER_NODE = "another node in its place: SLURM takes a list of nodes to leave out in the site file"


def gradient_sync(now: TrainingContext) -> Advice | None:
    """Find a gradient synchronisation that was measured to be faster than the profile's."""
    if now.train is None or now.network is None:
        return None
    parallel, rows = now.train.parallel, now.network.gradient_syncs
    proven = [row for row in rows if row.gradient_dtype == "fp32" and (row.ratio_low or 0.0) > 1]
    best = max(proven, key=lambda row: row.ratio_to_default or 0.0, default=None)
    same = (*_OF_EXCHANGE, "gradient_dtype")
    mine = next((row for row in rows if all(getattr(row, key) == getattr(parallel, key) for key in same)), None)
    if best is None or mine is None or mine is best or best.ratio is None:
        return None
    ratio = best.ratio if mine.ratio is None else Interval(value=best.ratio.value / mine.ratio.value)
    if ratio.value < WORTH_RATIO:
        return None
    settings = [(key, getattr(parallel, key), getattr(best, key)) for key in _OF_EXCHANGE]
    return Advice(
        claim=f"gradients travel faster with {best.strategy} and buckets of {best.bucket_cap_mib} MiB",
        evidence=(_gradient_sync_figure(mine, "as it is"), _gradient_sync_figure(best, "best that is proven")),
        gain=Gain.measured(ratio),
        cost="none that was seen; the sums of gradients are rounded in another order",
        changes=tuple(
            SettingChange(key=f"parallel.{key}", old=old, new=new) for key, old, new in settings if old != new
        ),
        would_change="another network, or another number of nodes",
        safe=best.strategy == parallel.strategy,
    )


def network_bound(now: TrainingContext) -> Advice | None:
    """Find ranks that wait for gradients, for which network tuning may help."""
    waits = now.loss("network", MATTERS_SHARE)
    if now.train is None or waits is None:
        return None
    if now.network is not None and now.run is None:
        return None
    return Advice(
        claim=f"{waits.share:.0%} of the step waits for gradients",
        evidence=(now.part_figure(waits, "waiting for gradients"),),
        gain=without(waits, (0.25, 0.5, 1.0)),
        cost="a quarter of an hour on two nodes; 16-bit gradients, if it comes to them, change the recipe, and are "
        "held to an equal loss first",
        command=now.network_command,
        would_change="a larger global batch, which exchanges more seldom and is another recipe",
    )


def too_many_nodes(now: TrainingContext) -> Advice | None:
    """Find more nodes than the global batch keeps busy."""
    spread = now.spread
    if spread is None or spread.nodes <= spread.useful_nodes:
        return None
    known, useful = spread.efficiency, spread.useful_efficiency
    ratio = known.scaled(1 / useful)
    return Advice(
        claim=f"on {spread.nodes} nodes this global batch trains at {known.value:.0%} of what they could; "
        f"{spread.useful_nodes} are the most that reach 90 %",
        evidence=(
            figure(f"efficiency of {spread.nodes} nodes", known, "share", spread.source, known="predicted"),
            figure(f"efficiency of {spread.useful_nodes} nodes", useful, "share", spread.source, known="predicted"),
        ),
        gain=Gain(of="GPU-hours", ratio=ratio.value, low=ratio.low, high=ratio.high, confidence=ratio.confidence),
        cost="the run takes longer on fewer nodes, and costs less",
        command=now.command("network", "--predict", "--nodes", f"{spread.useful_nodes},{spread.nodes}"),
        would_change="a deadline that is worth the GPU-hours, a faster network, or a larger global batch",
    )


def below_t_min(now: TrainingContext) -> Advice | None:
    """Find too few tokens per rank and step to hide gradient synchronisation behind computing."""
    spread = now.spread
    if spread is None or spread.nodes == 1 or spread.twice_the_batch_efficiency is None:
        return None
    wanted = 2 * spread.least_tokens_per_rank  # a planning margin, no theorem
    twice = spread.twice_the_batch_efficiency
    gain = twice / spread.efficiency.value
    if spread.tokens_per_rank >= wanted or gain < WORTH_RATIO:
        return None
    return Advice(
        claim=f"each rank has {spread.tokens_per_rank:,.0f} real tokens of a step on {spread.nodes} nodes, and needs "
        f"about {wanted:,.0f} (twice T_min) to compute while gradients travel",
        evidence=(
            figure("T_min", spread.least_tokens_per_rank, "tokens", spread.source, known="predicted"),
            figure("efficiency with twice the global batch", twice, "share", spread.source, known="predicted"),
        ),
        gain=Gain(ratio=gain),
        cost="a change of recipe: twice the global batch, the learning rate times 1.41 (Adam goes with the root), as "
        "much warm-up in tokens, half the steps; only below the gradient noise scale, which runs report",
        command=now.command("network", "--predict", "--nodes", str(spread.nodes)),
        would_change="16-bit gradients or a faster network, which halve T_min; fewer nodes",
    )


def slow_rank(now: TrainingContext) -> Advice | None:
    """Find one rank that all others wait for in most steps."""
    rows = [row for row in steps_of_this_start(now.run) if row.slowest_rank is not None] if now.run is not None else []
    if len(rows) < 4 or now.run is None:
        return _slow_products(now)
    (rank, times), *_ = Counter(row.slowest_rank for row in rows).most_common(1)
    ratio = statistics.median(row.slowest_rank_ratio or 1.0 for row in rows if row.slowest_rank == rank)
    lost = now.loss("straggler", 0.02)
    if times < PERSISTENT_SHARE * len(rows) or ratio < 1.1 or lost is None:
        return None
    slow = f"rank {rank}{on_host(now.run.header.hosts, rank)}"
    return Advice(
        claim=f"{slow} computes {ratio:.2f} times as long as the median rank, and every step waits for it",
        evidence=(
            now.part_figure(lost, "waiting for it", len(rows)),
            figure("its time, of the median rank's", ratio, "ratio", now.run_name, n=times),
        ),
        gain=without(lost),
        cost=f"{_OTHER_NODE}; look at that rank's node first, for heat, a power cap, or neighbours",
        command="autotune doctor",
        would_change="rows that are harder by chance, if it is not the same rank in the next run",
    )


def _slow_products(now: TrainingContext) -> Advice | None:
    """Find a slow rank before any run, from matmuls that all ranks computed at once."""
    rates = now.network.matmul_flops_per_s if now.network is not None else []
    slow = slow_members({str(rank): rate for rank, rate in enumerate(rates)})
    if len(rates) < 3 or not slow:
        return None
    rank, share = min(slow.items(), key=lambda one: one[1])
    return Advice(
        claim=f"rank {rank} multiplies at {share:.0%} of the median rank's speed, and every step would wait for it",
        evidence=(figure("its speed, of the median", share, "ratio", "links", n=len(rates)),),
        gain=Gain.between(1.0, 1 / share, 1 / share),
        cost=_OTHER_NODE,
        command="autotune doctor",
        would_change="a step that does not compute most of its time",
    )


def uneven_ranks(now: TrainingContext) -> Advice | None:
    """Find waits for a slowest rank that is another one every time."""
    lost = now.loss("straggler", MATTERS_SHARE)
    if now.run is None or now.train is None or lost is None or slow_rank(now) is not None:
        return None
    layout = now.train.layout
    packs = now.knows_the_model and layout != "packed"
    changes = (SettingChange(key="layout", old=layout, new="packed"),) if packs else ()
    return Advice(
        claim=f"{lost.share:.0%} of the step all ranks wait for one that takes longer, each time another one",
        evidence=(now.part_figure(lost, "waiting for it", len(now.run.steps)),),
        gain=times(without(lost, (0.0, 0.1, 1.0)), (1.0, 1.05, 1.2)),
        cost="packed rows are all alike, and hold no padding; the micro-batch is to be probed again"
        if changes
        else "nothing is known to: look at what else runs on the nodes, and at saves and logs on shared disks",
        changes=changes,
        command=now.probe_command(layout="packed") if changes else "autotune doctor",
        would_change="more micro-batches to a step: chance evens out in them",
    )


def slow_link(now: TrainingContext) -> Advice | None:
    """Find one link, passed by all messages, that is slower than its neighbours."""
    measured = [one.outcome for one in now.trials if one.trial.job == "links" and one.outcome.kind == "measured"]
    speeds = LinkFigures.of(measured[-1]).neighbours_bytes_per_s if measured else []
    rates = {f"{left} to {(left + 1) % len(speeds)}": rate for left, rate in enumerate(speeds)}
    slow = slow_members(rates)
    if len(rates) < 3 or not slow:
        return None
    name = min(slow, key=slow.__getitem__)
    share = rates[name] / max(rates.values())
    waits = now.bottleneck.part("network") if now.bottleneck is not None else None
    return Advice(
        claim=f"the link from node {name} has {share:.0%} of the fastest one's speed, and every exchange passes it",
        evidence=(figure("its speed, of the fastest", share, "ratio", "autotune network", n=len(rates)),),
        # A ring is as fast as its slowest link, so the wait for gradients shrinks as the travelling does, or more.
        gain=None if waits is None else without(waits, (share / 2, share, 1.0)),
        cost=_OTHER_NODE,
        command=now.network_command,
        would_change="traffic of others at that moment: measure again before a node is left out for good",
    )


def _gradient_sync_figure(row: GradientSyncRow, name: str) -> EvidenceFigure:
    way = f"{row.strategy}, {row.bucket_cap_mib} MiB buckets, "
    way += f"{row.gradient_accumulation_steps} times {row.micro_batch_size} rows"
    rate = row.tokens_per_s or math.nan
    return figure(f"{name}: {way}", rate, "tokens/s", "autotune network", n=row.steps)
