"""Where the time of a step goes, and what limits it: from a run's rows, or from what tuning measured. Pure.

A part is told only from figures that show it. Rows of a run hold waiting, computing and updating; what kernels did
inside of computing only a GPU's counters tell, which tuning reads while steps are fed from memory.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.bottleneck import Bottleneck, Cause, Part
from autotune.core.evidence import WorkersRow
from autotune.core.profile import Profile
from autotune.decide.statistics import t_quantile
from autotune.decide.work import place_share
from trainer.config import TrainConfig
from trainer.errors import BadConfig
from trainer.peaks import peak_flops_per_s, product_format
from trainer.record import Run, StepRow
from trainer.schema import parse_table

MATTERS_SHARE = 0.10
"""A part below this limits nothing: computing does."""
CONFIDENCE = 0.95
MOST_BLOCKS = 20
LEAST_BLOCKS = 4
"""Neighbouring steps are alike, so spread is told from blocks of them; fewer blocks show none."""
HEALTHY_BUSY_SHARE = 0.9
"""Of multiprocessors that have work in a step that nothing holds up: waves of blocks end unevenly."""
UNCERTAIN_SHARE = 0.8
"""Of a part that was read once: it may well be so much less."""
STRAGGLER_RATIO = 1.05
"""A rank that takes so much longer than the median holds the others up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the GPUs' counters said while steps were fed from memory; shares of time, 0 to 1."""

    busy_share: float | None = None
    """Multiprocessors that had work."""
    tensor_share: float | None = None
    """Matrix units that were in use."""
    memory_share: float | None = None
    """Of the memory's bandwidth."""
    source: str


def bottleneck_of_run(run: Run, counters: Counters | None = None) -> Bottleneck | None:
    """What limited a run; None before it took two logged steps.

    Args:
        run: The first row is left out: it pays for what is made once.
        counters: Of the same model and settings, from tuning.
    """
    rows = rows_of_this_start(run)
    if not rows:
        return None
    source = f"run {run.directory.name}, steps {rows[0].step} to {rows[-1].step}"
    return bottleneck_of_rows(
        rows, source=source, world_size=run.header.world_size, counters=counters, padding_costs=_place_share(run)
    )


def _place_share(run: Run) -> float:
    """Of its model; all, where another version of the trainer wrote its settings."""
    try:
        train = parse_table(TrainConfig, run.header.config, where="run")
    except BadConfig:
        return 1.0
    return place_share(train, run.header.parameters)


def rows_of_this_start(run: Run) -> tuple[StepRow, ...]:
    """Without earlier starts, which may have had other settings, and without the first, which pays for the start."""
    return tuple(row for row in run.steps if row.step > run.header.resumed_step)[1:]


def bottleneck_of_rows(
    rows: Sequence[StepRow],
    *,
    source: str,
    world_size: int,
    counters: Counters | None = None,
    padding_costs: float = 1.0,
) -> Bottleneck:
    """What limits these steps.

    Args:
        rows: At least one.
        source: Where they come from, for people.
        world_size: Ranks that took them.
        counters: Of the device; without, waiting for its memory cannot be told from computing.
        padding_costs: Part of computing that padding costs as well; a masked head does not compute it.
    """
    parts = _parts(rows, source, padding_costs)
    untold = []
    if world_size > 1 and any(row.communication_s is None for row in rows):
        untold.append("waiting for gradients: this strategy does not let it be told from computing")
    if counters is not None:
        parts = _with_counters(parts, counters)
    elif any(row.mfu is not None for row in rows):
        untold.append("waiting for launches or for the device's memory, inside of computing: autotune workers tells it")
    return _weighed(parts, rows, source, tuple(untold))


def bottleneck_of_profile(profile: Profile) -> Bottleneck | None:
    """What limited training when it was tuned; None where no loader workers were counted."""
    workers, probe = profile.evidence.workers, profile.evidence.probe
    row = None if workers is None else _row_of(workers.rows, profile.train.data.loader_workers)
    if workers is None or row is None:
        return None
    source = f"windows of training with {row.loader_workers} loader workers"
    shares: dict[Cause, float] = {"input": row.data_wait_share}
    fed = 1 - row.data_wait_share
    if probe is not None and profile.train.layout != "bucketed":  # those rows are as wide as what they hold
        of_places = place_share(profile.train, probe.parameters)
        shares["padding"] = (
            fed * of_places * (1 - min(1.0, probe.mean_real_tokens_per_row / profile.train.seq_length_tokens))
        )
    untold = ["clipping and update, and what goes by between steps: counted as computing here; a run tells them"]
    network = profile.evidence.network
    if network is not None and network.compute is not None:
        waiting = _exchange_share(profile)
        if waiting is not None:
            shares["network"] = fed * waiting
    elif workers.local_ranks > 1:
        untold.append("waiting for gradients: autotune network tells it")
    parts = [Part(cause=cause, share=share, source=source) for cause, share in shares.items()]
    counters = counters_of(row, profile)
    if counters is not None:
        parts = _with_counters(parts, counters)
    elif profile.train.device == "cuda":
        untold.append("waiting for launches or memory inside of computing: this GPU gave no counters")
    parts.append(Part(cause="computation", share=max(0.0, 1 - sum(one.share for one in parts)), source=source))
    parts.sort(key=lambda one: -one.share)
    limit = _limit(parts)
    mfu = _with_bounds(_mfu_of_windows(row, profile))
    return Bottleneck(
        limit=limit,
        decided=_decided(parts, limit),
        parts=tuple(parts),
        steps=len(row.slot_tokens_per_s),
        source=source,
        mfu=mfu[0],
        mfu_low=mfu[1],
        mfu_high=mfu[2],
        untold=tuple(untold),
    )


def counters_of(row: WorkersRow, profile: Profile) -> Counters | None:
    """The counters of the time in which devices were fed, in the windows of one count; None where the GPU gave none.

    Windows hold the wait for data as well, in which nothing is busy.
    """
    gpu, fed = row.gpu, 1 - row.data_wait_share
    if gpu is None or gpu.gpm_sm_share is None or fed <= 0:
        return None
    train = profile.train
    by_matrix_units = train.precision == "bf16" or train.tf32

    def when_fed(share: float | None) -> float | None:
        return None if share is None else min(1.0, share / fed)

    return Counters(
        busy_share=when_fed(gpu.gpm_sm_share),
        # Without products on matrix units their counter says nothing of how much is computed.
        tensor_share=when_fed(gpu.gpm_tensor_share) if by_matrix_units else None,
        memory_share=when_fed(gpu.gpm_dram_share),
        source=f"hardware counters, windows with {row.loader_workers} loader workers",
    )


def counters_of_profile(profile: Profile) -> Counters | None:
    """The counters of the chosen number of loader workers."""
    workers = profile.evidence.workers
    row = None if workers is None else _row_of(workers.rows, workers.chosen)
    return None if row is None else counters_of(row, profile)


def _parts(rows: Sequence[StepRow], source: str, padding_costs: float) -> list[Part]:
    """Every cause's part of all steps, with the spread of blocks of neighbouring ones."""
    whole = _shares(rows, padding_costs)
    count = min(MOST_BLOCKS, len(rows) // 2)
    if count < LEAST_BLOCKS:
        return [Part(cause=cause, share=share, source=source) for cause, share in whole.items()]
    edges = [round(number * len(rows) / count) for number in range(count + 1)]
    blocks = [_shares(rows[start:end], padding_costs) for start, end in itertools.pairwise(edges)]
    parts = []
    for cause, share in whole.items():
        spread = statistics.stdev(block[cause] for block in blocks)
        half = t_quantile(CONFIDENCE, count - 1) * spread / math.sqrt(count)
        parts.append(
            Part(cause=cause, share=share, low=max(0.0, share - half), high=min(1.0, share + half), source=source)
        )
    return parts


def _shares(rows: Sequence[StepRow], padding_costs: float) -> dict[Cause, float]:
    """Of the time of steps, what each cause took.

    Rank 0's wait for others is first theirs for their loaders, then for the slowest one, and then the network's. What a
    row says of all ranks is of an interval before it, so it is held against the others' wait in the mean of steps.
    """
    others_s = sum(row.communication_s or 0.0 for row in rows)
    own_data_s = sum(row.data_wait_s for row in rows)
    longest_s = sum(row.data_wait_s if row.longest_data_wait_s is None else row.longest_data_wait_s for row in rows)
    others_data_s = min(others_s, max(0.0, longest_s - own_data_s))
    ahead_s = sum(_slower_by_s(row) for row in rows if row.slowest_rank != 0)
    others_slow_s = min(others_s - others_data_s, ahead_s)
    own_slow_s = sum(_slower_by_s(row) for row in rows if row.slowest_rank == 0)
    padding_s = sum((1 - row.packing_efficiency) * _own_compute_s(row) for row in rows)
    seconds: dict[Cause, float] = {
        "input": own_data_s + others_data_s,
        "straggler": own_slow_s + others_slow_s,
        "network": others_s - others_data_s - others_slow_s,
        "update": sum(row.optimizer_s for row in rows),
        "padding": padding_costs * padding_s,
        "host": sum(map(_between_s, rows)),
    }
    whole_s = sum(row.step_s for row in rows) or 1.0
    return {cause: part_s / whole_s for cause, part_s in seconds.items()}


def _slower_by_s(row: StepRow) -> float:
    """What the slowest rank computes longer than the median one; 0 where that is hardly anything."""
    ratio = row.slowest_rank_ratio
    if ratio is None or ratio < STRAGGLER_RATIO:
        return 0.0
    # Where rank 0 is the slowest, it is its own computing that is long.
    return row.compute_s * (1 - 1 / ratio) if row.slowest_rank == 0 else (ratio - 1) * row.compute_s


def _own_compute_s(row: StepRow) -> float:
    """Computing, without what only a slow rank 0 adds."""
    return row.compute_s - (_slower_by_s(row) if row.slowest_rank == 0 else 0.0)


def _between_s(row: StepRow) -> float:
    """Of a step that is neither waiting nor computing nor updating: the program's own doings between steps."""
    told = row.data_wait_s + row.compute_s + (row.communication_s or 0.0) + row.optimizer_s
    return max(0.0, row.step_s - told)


def _with_counters(parts: Sequence[Part], counters: Counters) -> list[Part]:
    """With what counters tell of the time in which devices compute.

    Multiprocessors without work in a step that is fed wait for launches, beyond what the ends of kernels leave idle.
    Memory traffic beyond what matrix units do meanwhile is the least time in which kernels waited for memory, as a
    kernel at full bandwidth counts fully.
    """
    found = {one.cause: one for one in parts}
    computing = max(0.0, 1 - sum(one.share for one in parts if one.cause != "padding"))
    if counters.busy_share is not None:
        idle = computing * max(0.0, HEALTHY_BUSY_SHARE - counters.busy_share) / HEALTHY_BUSY_SHARE
        before = found.get("host")
        found["host"] = Part(cause="host", share=idle + (before.share if before else 0.0), source=counters.source)
        computing -= idle
    if counters.memory_share is not None and counters.tensor_share is not None:
        waits = computing * max(0.0, counters.memory_share - counters.tensor_share)
        found["memory"] = Part(cause="memory", share=waits, source=counters.source)
    return list(found.values())


def _weighed(parts: list[Part], rows: Sequence[StepRow], source: str, untold: tuple[str, ...]) -> Bottleneck:
    rest = max(0.0, 1 - sum(one.share for one in parts))
    every = sorted([*parts, Part(cause="computation", share=rest, source=source)], key=lambda one: -one.share)
    limit = _limit(every)
    mfu = _with_bounds([row.mfu for row in rows if row.mfu is not None])
    return Bottleneck(
        limit=limit,
        decided=_decided(every, limit),
        parts=tuple(every),
        steps=len(rows),
        source=source,
        mfu=mfu[0],
        mfu_low=mfu[1],
        mfu_high=mfu[2],
        untold=untold,
    )


def _with_bounds(shares: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """The mean of readings of a share, and its bounds; None where there are too few of them."""
    if not shares:
        return None, None, None
    mean = statistics.fmean(shares)
    if len(shares) <= LEAST_BLOCKS:
        return mean, None, None
    half = t_quantile(CONFIDENCE, len(shares) - 1) * statistics.stdev(shares) / math.sqrt(len(shares))
    return mean, max(0.0, mean - half), mean + half


def _mfu_of_windows(row: WorkersRow, profile: Profile) -> list[float]:
    """Of each window, the part of the GPU's dense peak that the mathematics of real tokens took."""
    gpu, train = profile.fingerprint.gpu_name, profile.train
    if gpu is None or train.device != "cuda":
        return []
    peak = peak_flops_per_s(gpu, product_format(train.precision, tf32=train.tf32))
    return [] if peak is None else [flops / peak for flops in row.model_flops_per_s_per_rank]


def _limit(parts: Sequence[Part]) -> Cause:
    losses = [one for one in parts if one.cause != "computation" and one.share >= MATTERS_SHARE]
    return max(losses, key=lambda one: one.share).cause if losses else "computation"


def _decided(parts: Sequence[Part], limit: Cause) -> bool:
    """Whether the interval of the limit lies clear of the threshold, and above all other losses."""
    losses = [one for one in parts if one.cause not in ("computation", limit)]
    highest = max((one.share if one.high is None else one.high for one in losses), default=0.0)
    if limit == "computation":
        return highest < MATTERS_SHARE
    own = next(one for one in parts if one.cause == limit)
    low = own.share * UNCERTAIN_SHARE if own.low is None else own.low
    return low >= MATTERS_SHARE and low > max((one.share for one in losses), default=0.0)


def _row_of(rows: Sequence[WorkersRow], count: int) -> WorkersRow | None:
    return next((row for row in rows if row.loader_workers == count), None)


def _exchange_share(profile: Profile) -> float | None:
    """Part of a measured step in which ranks wait for gradients, exchanged as the profile says."""
    network, parallel = profile.evidence.network, profile.train.parallel
    for row in network.exchanges if network is not None else ():
        same = (row.strategy, row.gradient_dtype, row.bucket_cap_mib) == (
            parallel.strategy, parallel.gradient_dtype, parallel.bucket_cap_mib,
        )  # fmt: skip
        if same and row.communication_share is not None:
            return row.communication_share
    return None
