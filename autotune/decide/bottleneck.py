"""Where the time of a step goes, and what limits it: from a run's rows, or from what tuning measured. Pure.

A part is told only from figures that show it. Rows of a run hold waiting, computing and updating; what kernels did
inside of computing only a GPU's counters tell, which tuning reads while steps are fed from memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autotune.core.bottleneck import Bottleneck, Cause, Part
from autotune.core.evidence import ComputeEvidence, ExchangeRow, WorkersRow
from autotune.core.interval import Interval
from autotune.core.profile import Profile
from autotune.decide.counters import Counters, counters_of, data_share, row_of, with_counters
from autotune.decide.network import expected_largest
from autotune.decide.statistics import Estimate, of_steps, of_windows
from autotune.decide.step_parts import parts_of_rows, uneven_share
from autotune.decide.work import place_share
from trainer.config import TrainConfig
from trainer.errors import BadConfig
from trainer.peaks import peak_flops_per_s, product_format
from trainer.record import Run, StepRow
from trainer.schema import parse_table

MATTERS_SHARE = 0.10
"""A part below this limits nothing: computing does."""
UNCERTAIN_SHARE = 0.8
"""Of a part that was read once: it may well be so much less."""
UNEVEN_SHARE = 0.05
"""Standard deviation of what a rank computes, from step to step, that devices do not have on rows that are alike."""


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
    train = _settings_of(run)
    return _of_rows(
        rows,
        source=source,
        world_size=run.header.world_size,
        counters=counters,
        padding_costs=1.0 if train is None else place_share(train, run.header.parameters),
        loads_ahead=train is None or _loads_ahead(train),
    )


def _settings_of(run: Run) -> TrainConfig | None:
    """None where another version of the trainer wrote them."""
    try:
        return parse_table(TrainConfig, run.header.config, where="run")
    except BadConfig:
        return None


def _loads_ahead(train: TrainConfig) -> bool:
    """Whether batches are made while the device is at earlier ones."""
    return train.device == "cuda" or train.data.loader_workers > 0


def rows_of_this_start(run: Run) -> tuple[StepRow, ...]:
    """Without earlier starts, which may have had other settings, and without the first, which pays for the start.

    What the first step was on all ranks a later row tells: the first that tells anything.
    """
    rows = [row for row in run.steps if row.step > run.header.resumed_step]
    tells = (number for number, row in enumerate(rows) if row.longest_data_wait_s is not None)
    first = next(tells, 0)
    if first:
        rows[first] = rows[first].model_copy(update=dict.fromkeys(_OF_ALL_RANKS))
    return tuple(rows)[1:]


_OF_ALL_RANKS = ("slowest_rank", "slowest_rank_ratio", "longest_data_wait_s", "longest_data_wait_rank")


def _of_rows(
    rows: Sequence[StepRow],
    *,
    source: str,
    world_size: int,
    counters: Counters | None,
    padding_costs: float,
    loads_ahead: bool,
) -> Bottleneck:
    """What limits these steps.

    Args:
        rows: At least one.
        source: Where they come from, for people.
        world_size: Ranks that took them.
        counters: Of the device; without, waiting for its memory cannot be told from computing.
        padding_costs: Part of computing that padding costs as well; a masked head does not compute it.
        loads_ahead: Whether batches are made while the device is at earlier ones.
    """
    parts = parts_of_rows(rows, source, padding_costs)
    launching = 0.0
    untold = []
    if world_size > 1 and any(row.communication_s is None for row in rows):
        untold.append("waiting for gradients: this strategy does not let it be told from computing")
    if counters is not None:
        parts, launching = with_counters(parts, counters, uneven_share(rows))
    elif any(row.mfu is not None for row in rows):
        untold.append("waiting for launches or for the device's memory, inside of computing: autotune workers tells it")
    weighed = _weigh(parts, source, loads_ahead=loads_ahead, launching=launching)
    mfus = [row.mfu for row in rows if row.mfu is not None]
    return Bottleneck(
        limit=weighed.limit,
        decided=weighed.decided,
        parts=weighed.parts,
        steps=len(rows),
        source=source,
        untold=tuple(untold),
        mfu=_mfu(of_steps(mfus, [1.0] * len(mfus), scale="linear")) if mfus else None,
    )


def bottleneck_of_profile(profile: Profile) -> Bottleneck | None:
    """What limited training when it was tuned; None where no loader workers were counted."""
    workers, probe = profile.evidence.workers, profile.evidence.probe
    row = None if workers is None else row_of(workers.rows, profile.train.data.loader_workers)
    if workers is None or row is None:
        return None
    source = f"windows of training with {row.loader_workers} loader workers"
    shares: dict[Cause, float] = {"input": data_share(row)}
    fed = 1 - shares["input"]
    untold = ["clipping and update, and what goes by between steps: counted as computing here; a run tells them"]
    exchange, network = _exchange(profile), profile.evidence.network
    if exchange is not None:
        shares |= {"network": fed * exchange.travelling, "straggler": fed * (exchange.waiting - exchange.travelling)}
    elif workers.local_ranks > 1 and (network is None or network.compute is None):
        untold.append("waiting for gradients: autotune network tells it")
    if profile.train.layout == "bucketed":
        untold.append("padding: rows are as wide as what they hold, which a run tells")
    elif probe is not None:
        empty = 1 - min(1.0, probe.mean_real_tokens_per_row / profile.train.seq_length_tokens)
        shares["padding"] = place_share(profile.train, probe.parameters) * empty * (1 - sum(shares.values()))
    parts = [Part(cause=cause, share=share, source=source) for cause, share in shares.items()]
    counters, launching = counters_of(row, profile), 0.0
    if counters is not None:
        parts, launching = with_counters(parts, counters, _uneven_share(profile, shares.get("straggler", 0.0)))
    elif profile.train.device == "cuda":
        untold.append("waiting for launches or memory inside of computing: this GPU gave no counters")
    if shares.get("network", 0.0) >= MATTERS_SHARE:
        launching = 0.0  # steps in which nothing travels were shorter: no program was behind
    weighed = _weigh(parts, source, loads_ahead=_loads_ahead(profile.train), launching=launching)
    mfus = _mfu_of_windows(row, profile)
    return Bottleneck(
        limit=weighed.limit,
        decided=weighed.decided,
        parts=weighed.parts,
        steps=len(row.slot_tokens_per_s),
        source=source,
        untold=tuple(untold),
        mfu=_mfu(of_windows(mfus, scale="linear")) if mfus else None,
    )


def _uneven_share(profile: Profile, waiting: float) -> float:
    """Of a step, the wait for other ranks where it is one for programs that hand out work unevenly."""
    network = profile.evidence.network
    is_uneven = network is not None and network.compute is not None and network.compute.jitter_share >= UNEVEN_SHARE
    return waiting if is_uneven and profile.train.layout != "bucketed" else 0.0


class _Weighed(NamedTuple):
    limit: Cause
    decided: bool
    parts: tuple[Part, ...]


def _weigh(parts: Sequence[Part], source: str, *, loads_ahead: bool, launching: float) -> _Weighed:
    """All parts, largest first, and the limit.

    It is the largest one, with two exceptions. A loader that works ahead and is waited for all the same sets the pace:
    whatever else is made shorter, it is waited for as much longer. So do programs that are behind their devices.

    Args:
        parts: Of a step, computing not among them.
        source: Where they come from.
        loads_ahead: Whether the loader works ahead.
        launching: Waiting for launches.
    """
    rest = max(0.0, 1 - sum(one.share for one in parts))
    every = sorted([*parts, Part(cause="computation", share=rest, source=source)], key=lambda one: -one.share)
    losses = [one for one in every if one.cause != "computation"]
    large = [one for one in losses if one.share >= MATTERS_SHARE]
    sets_the_pace = {"input": loads_ahead, "host": launching >= MATTERS_SHARE}
    first = [one for one in large if sets_the_pace.get(one.cause)]
    if not large:
        highest = max((one.share if one.high is None else one.high for one in losses), default=0.0)
        return _Weighed("computation", highest < MATTERS_SHARE, tuple(every))
    limit = (first or large)[0]
    low = limit.share * UNCERTAIN_SHARE if limit.low is None else limit.low
    others = [] if first else [one.share for one in losses if one is not limit]
    return _Weighed(limit.cause, low >= MATTERS_SHARE and low > max(others, default=0.0), tuple(every))


def _mfu(found: Estimate) -> Interval:
    known = found.interval()
    return replace(known, low=None if known.low is None else max(0.0, known.low))


def _mfu_of_windows(row: WorkersRow, profile: Profile) -> list[float]:
    """Of each window, the part of the GPU's dense peak that the mathematics of real tokens took."""
    gpu, train = profile.fingerprint.gpu_name, profile.train
    if gpu is None or train.device != "cuda":
        return []
    peak = peak_flops_per_s(gpu, product_format(train.precision, tf32=train.tf32))
    return [] if peak is None else [flops / peak for flops in row.model_flops_per_s_per_rank]


class _Exchange(NamedTuple):
    waiting: float
    """Part of a measured step in which ranks wait for gradients."""
    travelling: float
    """Part that it takes longer than one in which none travels."""


def _exchange(profile: Profile) -> _Exchange | None:
    """What exchanging gradients costs as the profile has it; None where that was not measured."""
    network, parallel = profile.evidence.network, profile.train.parallel
    if network is None or network.compute is None:
        return None
    for row in network.exchanges:
        same = (row.strategy, row.gradient_dtype, row.bucket_cap_mib) == (
            parallel.strategy, parallel.gradient_dtype, parallel.bucket_cap_mib,
        )  # fmt: skip
        if same and row.communication_share is not None and row.step_s is not None:
            alone_s = _alone_s(network.compute, row, network.nodes * network.ranks_per_node)
            travelling = min(row.communication_share, max(0.0, 1 - alone_s / row.step_s))
            return _Exchange(row.communication_share, travelling)
    return None


def _alone_s(compute: ComputeEvidence, row: ExchangeRow, ranks: int) -> float:
    """A step of the slowest of so many ranks while no gradient travels."""
    one_s = compute.fixed_s + (compute.micro_batch_s - compute.fixed_s) * row.rows / compute.rows
    return row.micro_batches * one_s * (1 + compute.jitter_share * expected_largest(ranks)) + compute.update_s
