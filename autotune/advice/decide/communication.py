"""Advice on ranks and nodes: the paper's fourth recommendation, and its limits."""

import math
import statistics
from collections import Counter

from autotune.advice.decide.bottleneck import MATTERS_SHARE, steps_of_this_start
from autotune.advice.decide.context import (
    PERSISTENT_SHARE,
    TrainingContext,
    on_host,
    times,
    without,
)
from autotune.advice.decide.rule import rule
from autotune.base.interval import Interval
from autotune.base.units import format_percent
from autotune.evidence.advice import Advice, EvidenceFigure, Gain, SettingChange, figure
from autotune.evidence.network import GradientSyncRow
from autotune.network.decide.link_fit import slow_members
from autotune.trials.job_figures import LinkFigures

WORTH_RATIO = 1.02
_KEYS = ("strategy", "bucket_cap_mib", "shard_ranks")
_OTHER_NODE = "another node (exclude this one in the SLURM site file)"


@rule("R4, network")
def gradient_sync(now: TrainingContext) -> Advice | None:
    """Find a gradient synchronisation that is verified to be faster.

    It is compared with the profile's at 98 % confidence.
    """
    if now.train is None or now.evidence.network is None:
        return None
    parallel, rows = now.train.parallel, now.evidence.network.gradient_syncs
    faster = [
        row
        for row in rows
        if row.gradient_dtype == "fp32" and (row.ratio_low or 0.0) > 1
    ]
    best = max(faster, key=lambda row: row.ratio_to_default or 0.0, default=None)
    same = (*_KEYS, "gradient_dtype")
    mine = next(
        (
            row
            for row in rows
            if all(getattr(row, key) == getattr(parallel, key) for key in same)
        ),
        None,
    )
    if best is None or mine is None or mine is best or best.ratio is None:
        return None
    ratio = (
        best.ratio
        if mine.ratio is None
        else Interval(value=best.ratio.value / mine.ratio.value)
    )
    if ratio.value < WORTH_RATIO:
        return None
    settings = [(key, getattr(parallel, key), getattr(best, key)) for key in _KEYS]
    return Advice(
        claim=(
            f"gradient synchronisation is faster with {best.strategy} and buckets of"
            f" {best.bucket_cap_mib} MiB"
        ),
        evidence=(
            _gradient_sync_figure(mine, "current"),
            _gradient_sync_figure(best, "fastest at 98 % confidence"),
        ),
        gain=Gain.measured(ratio),
        cost="none measured; gradient sums are rounded in another order",
        changes=tuple(
            SettingChange(key=f"parallel.{key}", old=old, new=new)
            for key, old, new in settings
            if old != new
        ),
        would_change="another network, or another number of nodes",
        safe=best.strategy == parallel.strategy,
    )


@rule("R4, network")
def network_bound(now: TrainingContext) -> Advice | None:
    """Find ranks that wait for gradients, for which network tuning may help."""
    waits = now.loss("network", MATTERS_SHARE)
    if (
        now.train is None
        or waits is None
        or (now.evidence.network is not None and now.run is None)
    ):
        return None
    return Advice(
        claim=(
            f"gradient synchronisation delays the step by {format_percent(waits.share)}"
        ),
        evidence=(now.part_figure(waits, "wait for gradients"),),
        gain=without(waits, (0.25, 0.5, 1.0)),
        cost=(
            "15 minutes on two nodes; 16-bit gradients change the recipe and are used"
            " only if the loss stays equal"
        ),
        command=now.command("network", *(("--slurm",) if now.nodes > 1 else ())),
        would_change=(
            "a larger global batch, which needs fewer synchronisations but changes the"
            " recipe"
        ),
    )


@rule("R4, network")
def too_many_nodes(now: TrainingContext) -> Advice | None:
    """Find more nodes than the global batch keeps busy."""
    spread = now.spread
    if spread is None or spread.nodes <= spread.useful_nodes:
        return None
    known, useful = spread.efficiency, spread.useful_efficiency
    ratio = known.scaled(1 / useful)
    return Advice(
        claim=(
            f"{spread.nodes} nodes reach {format_percent(known.value)} efficiency"
            f" with this global batch; {spread.useful_nodes}"
            " are the most with at least 90 %"
        ),
        evidence=(
            figure(
                f"efficiency of {spread.nodes} nodes",
                known,
                "share",
                spread.source,
                known="predicted",
            ),
            figure(
                f"efficiency of {spread.useful_nodes} nodes",
                useful,
                "share",
                spread.source,
                known="predicted",
            ),
        ),
        gain=Gain(
            of="GPU-hours",
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            confidence=ratio.confidence,
        ),
        cost="a longer, but cheaper run",
        command=now.command(
            "network", "--predict", "--nodes", f"{spread.useful_nodes},{spread.nodes}"
        ),
        would_change=(
            "a deadline that is worth the GPU-hours, a faster network, or a larger"
            " global batch"
        ),
    )


@rule("R4, network")
def below_t_min(now: TrainingContext) -> Advice | None:
    """Find too few tokens per GPU and step to overlap synchronisation with compute."""
    spread = now.spread
    if spread is None or spread.nodes == 1:
        return None
    # A margin for planning.
    wanted, twice = 2 * spread.least_tokens_per_rank, spread.twice_the_batch_efficiency
    gain = twice / spread.efficiency.value
    if spread.tokens_per_rank >= wanted or gain < WORTH_RATIO:
        return None
    return Advice(
        claim=(
            f"each GPU has {spread.tokens_per_rank:,.0f} non-padding tokens of a step"
            f" on {spread.nodes} nodes, and needs about {wanted:,.0f} (twice T_min) to"
            " overlap gradient synchronisation with compute"
        ),
        evidence=(
            figure(
                "T_min",
                spread.least_tokens_per_rank,
                "tokens",
                spread.source,
                known="predicted",
            ),
            figure(
                "efficiency with twice the global batch",
                twice,
                "share",
                spread.source,
                known="predicted",
            ),
        ),
        gain=Gain(ratio=gain),
        cost=(
            "a change of recipe: twice the global batch, the learning rate times 1.41"
            " (square-root rule for Adam), the same warm-up in tokens, half the steps;"
            " only useful below the gradient noise scale, which runs report"
        ),
        command=now.command("network", "--predict", "--nodes", str(spread.nodes)),
        would_change="16-bit gradients, a faster network, or fewer nodes",
    )


@rule("straggler")
def slow_rank(now: TrainingContext) -> Advice | None:
    """Find one rank that all others wait for in most steps."""
    rows = (
        [row for row in steps_of_this_start(now.run) if row.slowest_rank is not None]
        if now.run is not None
        else []
    )
    if len(rows) < 4 or now.run is None:
        return _slow_matmuls(now)
    (rank, times), *_ = Counter(row.slowest_rank for row in rows).most_common(1)
    ratio = statistics.median(
        row.slowest_rank_ratio or 1.0 for row in rows if row.slowest_rank == rank
    )
    lost = now.loss("straggler", 0.02)
    if times < PERSISTENT_SHARE * len(rows) or ratio < 1.1 or lost is None:
        return None
    slow, source = (
        f"rank {rank}{on_host(now.run.header.hosts, rank)}",
        f"run {now.run.directory.name}",
    )
    return Advice(
        claim=(
            f"{slow} computes {ratio:.2f} times as long as the median rank and delays"
            " every step"
        ),
        evidence=(
            now.part_figure(lost, "wait for the slowest rank", len(rows)),
            figure(
                "compute time relative to the median rank",
                ratio,
                "ratio",
                source,
                n=times,
            ),
        ),
        gain=without(lost),
        cost=(
            f"{_OTHER_NODE}; first check its present node for heat, a power cap, or"
            " other jobs"
        ),
        command="autotune doctor",
        would_change=(
            "another slowest rank in the next run: then its sequences were longer by"
            " chance"
        ),
    )


def _slow_matmuls(now: TrainingContext) -> Advice | None:
    """Find a slow rank from matmuls that all ranks ran at the same time.

    This finds it before any run.
    """
    rates = (
        now.evidence.network.matmul_flops_per_s
        if now.evidence.network is not None
        else []
    )
    slow = slow_members({str(rank): rate for rank, rate in enumerate(rates)})
    if len(rates) < 3 or not slow:
        return None
    rank, share = min(slow.items(), key=lambda one: one[1])
    return Advice(
        claim=(
            f"rank {rank} runs matmuls at {format_percent(share)} of the median"
            " rank's speed and would delay every step"
        ),
        evidence=(
            figure(
                "matmul speed relative to the median",
                share,
                "ratio",
                "autotune network",
                n=len(rates),
            ),
        ),
        gain=Gain.between(1.0, 1 / share, 1 / share),
        cost=_OTHER_NODE,
        command="autotune doctor",
        would_change="a step that spends little of its time on compute",
    )


@rule("straggler")
def uneven_ranks(now: TrainingContext) -> Advice | None:
    """Find waits for a slowest rank that changes from step to step."""
    lost = now.loss("straggler", MATTERS_SHARE)
    if (
        now.run is None
        or now.train is None
        or lost is None
        or slow_rank(now) is not None
    ):
        return None
    layout = now.train.layout
    packs = now.knows_the_model and layout != "packed"
    changes = (SettingChange(key="layout", old=layout, new="packed"),) if packs else ()
    return Advice(
        claim=(
            f"ranks wait {format_percent(lost.share)} of the step for the slowest"
            " one, which changes from step to step"
        ),
        evidence=(
            now.part_figure(lost, "wait for the slowest rank", len(now.run.steps)),
        ),
        gain=times(without(lost, (0.0, 0.1, 1.0)), (1.0, 1.05, 1.2)),
        cost=(
            "another probe of the micro-batch; packed sequences have equal lengths and"
            " no padding"
            if changes
            else (
                "no remedy is known: look for other jobs on the nodes, and for"
                " checkpoints and logs on shared disks"
            )
        ),
        changes=changes,
        command=now.probe_command(layout="packed") if changes else "autotune doctor",
        would_change=(
            "more gradient accumulation steps, over which differences average out"
        ),
    )


@rule("network")
def slow_link(now: TrainingContext) -> Advice | None:
    """Find one link that is slower than the others and slows every all-reduce down."""
    measured = [
        one.outcome
        for one in now.trials
        if one.trial.job == "links" and one.outcome.kind == "measured"
    ]
    speeds = LinkFigures.of(measured[-1]).neighbours_bytes_per_s if measured else []
    rates = {
        f"{left} to {(left + 1) % len(speeds)}": rate
        for left, rate in enumerate(speeds)
    }
    slow = slow_members(rates)
    if len(rates) < 3 or not slow:
        return None
    name = min(slow, key=slow.__getitem__)
    share = rates[name] / max(rates.values())
    waits = now.bottleneck.part("network") if now.bottleneck is not None else None
    return Advice(
        claim=(
            f"the link from node {name} has {format_percent(share)} of the fastest"
            " link's speed and delays every all-reduce"
        ),
        evidence=(
            figure(
                "speed relative to the fastest link",
                share,
                "ratio",
                "autotune network",
                n=len(rates),
            ),
        ),
        # A ring is as fast as its slowest link, so the wait shrinks at least in
        # proportion to the transfer time.
        gain=None if waits is None else without(waits, (share / 2, share, 1.0)),
        cost=_OTHER_NODE,
        command=now.command("network", *(("--slurm",) if now.nodes > 1 else ())),
        would_change=(
            "traffic of other jobs during the measurement: measure again before you"
            " exclude a node"
        ),
    )


def _gradient_sync_figure(row: GradientSyncRow, name: str) -> EvidenceFigure:
    way = (
        f"{row.sync.name}, {row.gradient_accumulation_steps} x {row.micro_batch_size}"
        " sequences"
    )
    return figure(
        f"{name}: {way}",
        row.tokens_per_s or math.nan,
        "tokens/s",
        "autotune network",
        n=row.steps,
    )
