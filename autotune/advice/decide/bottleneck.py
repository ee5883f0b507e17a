"""Shares of a step's time by cause, and the bottleneck.

They come from a run's steps or from tuning. Everything here is pure.
"""

import collections
import statistics
from collections.abc import Sequence
from dataclasses import replace

from autotune.advice.decide.gpu_counters import (
    IN_WINDOWS,
    Counters,
    counters_of,
    data_share,
    idle_part,
    with_counters,
)
from autotune.base.estimates import Estimate
from autotune.base.step_statistics import (
    block_count,
    estimate_blocks,
    estimate_steps,
    split_blocks,
)
from autotune.base.window_statistics import estimate_windows
from autotune.evidence.advice import Bottleneck, Cause, StepPart
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersRow
from autotune.network.decide.step_model import expected_largest
from autotune.subjects.mlm.model_work import position_share
from trainer.formats.gpu_peaks import matmul_format, peak_flops_per_s
from trainer.formats.recorded_settings import settings_of
from trainer.formats.run_record import Run, StepRow
from trainer.formats.train_config import TRIMMED_LAYOUTS

MATTERS_SHARE = 0.10
"""Least share of a part that can be the bottleneck; if all others are below it, compute
is."""
UNCERTAIN_SHARE = 0.8
"""Assumed lower bound of a part without a confidence interval, as a share of its
value."""
UNEVEN_SHARE = 0.05
"""Relative standard deviation of a rank's compute time that GPUs do not reach on equal
sequences."""
STRAGGLER_RATIO = 1.05
"""Least ratio of the slowest rank's time to the median at which it counts as slow."""
SAME_RANK_SHARE = 0.95
"""Least share of all delays by slow ranks that one rank causes if its GPU is slow."""


def bottleneck_of_run(run: Run, counters: Counters | None = None) -> Bottleneck | None:
    """Return the bottleneck of a run.

    Args:
        run: The run's record.
        counters: Hardware counters of the same model and settings, if there are any.

    Returns:
        The bottleneck, or None before two steps are logged.
    """
    rows = steps_of_this_start(run)
    if not rows:
        return None
    source = f"run {run.directory.name}, steps {rows[0].step} to {rows[-1].step}"
    train = settings_of(run.header.config)
    parts = parts_of_steps(
        rows,
        source,
        1.0 if train is None else position_share(train, run.header.parameters),
    )
    launching, untold = 0.0, []
    if run.header.world_size > 1 and any(row.communication_s is None for row in rows):
        untold.append(
            "gradient synchronisation (counted as compute, because this strategy"
            " hides it)"
        )
    mfus = [row.mfu for row in rows if row.mfu is not None]
    if counters is not None:
        parts, launching = with_counters(parts, counters, uneven_share(rows))
    elif mfus:
        untold.append(
            "kernel launches and GPU memory bandwidth (autotune workers measures them)"
        )
    mfu = estimate_steps(mfus, [1.0] * len(mfus), scale="linear") if mfus else None
    return _weigh(
        parts,
        source,
        len(rows),
        untold,
        mfu,
        loads_ahead=(
            train is None or train.device == "cuda" or train.data.num_workers > 0
        ),
        launching=launching,
    )


def steps_of_this_start(run: Run) -> tuple[StepRow, ...]:
    """Return the steps since the last start, as a restart may have changed settings.

    The first of them is slow and is left out.
    """
    rows = [row for row in run.steps if row.step > run.header.resumed_step]
    # Figures of all ranks lag behind: the first row that has any describes the first
    # step.
    if first := next(
        (
            number
            for number, row in enumerate(rows)
            if row.longest_data_wait_s is not None
        ),
        0,
    ):
        told = (
            "slowest_rank",
            "slowest_rank_ratio",
            "longest_data_wait_s",
            "longest_data_wait_rank",
        )
        rows[first] = rows[first].model_copy(update=dict.fromkeys(told))
    return tuple(rows)[1:]


def bottleneck_of_profile(profile: Profile) -> Bottleneck | None:
    """Return the bottleneck during tuning.

    Returns:
        The bottleneck, or None if the profile's number of DataLoader workers was not
        measured.
    """
    workers, count = profile.evidence.workers, profile.num_workers
    rows = [] if workers is None else workers.rows
    row = next((row for row in rows if row.num_workers == count), None)
    if workers is None or row is None:
        return None
    source = f"timed {IN_WINDOWS}{count}"
    shares: dict[Cause, float] = {"data loading": data_share(row)}
    keeps_up = 1 - shares["data loading"]
    untold = [
        "optimizer step and time between steps (counted as compute; a training run"
        " measures them)"
    ]
    if not profile.has_train:
        untold = ["optimizer step and padding (counted as compute)"]
    gradient_sync, network = _communication_shares(profile), profile.evidence.network
    if gradient_sync is not None:
        waiting, travelling = gradient_sync
        shares |= {
            "network": keeps_up * travelling,
            "straggler": keeps_up * (waiting - travelling),
        }
    elif workers.local_ranks > 1 and network is None:
        untold.append("gradient synchronisation (autotune network measures it)")
    is_trimmed = profile.has_train and profile.train.layout in TRIMMED_LAYOUTS
    if is_trimmed:
        untold.append(
            "padding (the width of batches varies; a training run measures it)"
        )
    padding = _padding_share(profile)
    if padding is not None:
        shares["padding"] = padding * (1 - sum(shares.values()))
    parts = [
        StepPart(cause=cause, share=share, source=source)
        for cause, share in shares.items()
    ]
    counters, launching = counters_of(row), 0.0
    idle = idle_part(row)
    if counters is not None:
        compute = None if network is None else network.compute
        jitter_share = 0.0 if compute is None else compute.jitter_share
        # Compute times that vary from step to step on equal sequences come from late
        # kernel launches.
        is_uneven = jitter_share >= UNEVEN_SHARE and not is_trimmed
        parts, launching = with_counters(
            parts, counters, shares.get("straggler", 0.0) if is_uneven else 0.0
        )
    elif idle is not None:
        parts, launching = [*parts, idle], idle.share
        untold.append(
            "short gaps between kernels, and GPU memory bandwidth (this GPU has no"
            " hardware counters)"
        )
    elif profile.fingerprint.device == "cuda":
        untold.append(
            "kernel launches and GPU memory bandwidth (this GPU has no hardware"
            " counters)"
        )
    if shares.get("network", 0.0) >= MATTERS_SHARE:
        # Steps without synchronisation were shorter: launches were not late.
        launching = 0.0
    found = _weigh(
        parts,
        source,
        len(row.units_per_s),
        untold,
        _mfu(profile, row),
        loads_ahead=profile.fingerprint.device == "cuda" or row.num_workers > 0,
        launching=launching,
    )
    # Windows too noisy to judge the loader do not make it a certain bottleneck.
    if found.limit == "data loading" and row.verdict == "open":
        return replace(found, decided=False)
    return found


def _padding_share(profile: Profile) -> float | None:
    """Return the share of compute on padding, which sequences of equal width show.

    Returns:
        The share; None if it is not known.
    """
    probe = profile.evidence.probe
    # Your own code does not tell which part of its work is padding.
    if probe is None or not profile.has_train:
        return None
    train = profile.train
    if train.layout in TRIMMED_LAYOUTS:
        return None
    empty = 1 - min(1.0, probe.tokens_per_sequence / train.seq_length_tokens)
    return position_share(train, probe.parameters) * empty


def _mfu(profile: Profile, row: WorkersRow) -> Estimate | None:
    """Return the share of the GPU's dense peak that the model's FLOPs reach.

    Returns:
        The share over windows; None if the FLOPs or the number format of matmuls are
        not known.
    """
    gpu = profile.fingerprint.gpu_name
    if gpu is None or not profile.has_train:
        return None
    train = profile.train
    peak = peak_flops_per_s(gpu, matmul_format(train.precision, tf32=train.tf32))
    if peak is None or train.device != "cuda" or not row.model_flops_per_s_per_rank:
        return None
    mfus = [flops / peak for flops in row.model_flops_per_s_per_rank]
    return estimate_windows(mfus, scale="linear")


def _weigh(
    parts: Sequence[StepPart],
    source: str,
    steps: int,
    untold: Sequence[str],
    mfu: Estimate | None,
    *,
    loads_ahead: bool,
    launching: float,
) -> Bottleneck:
    """Return the largest part of the step that is not compute as the bottleneck.

    Data loading ahead of the device (``loads_ahead``) and late kernel launches
    (``launching``, a share of the step) take precedence: they run concurrently with the
    GPU, so if other parts shrink, the wait for them grows by as much.
    """
    rest = max(0.0, 1 - sum(one.share for one in parts))
    every = sorted(
        [*parts, StepPart(cause="compute", share=rest, source=source)],
        key=lambda one: -one.share,
    )
    losses = [one for one in every if one.cause != "compute"]
    large = [one for one in losses if one.share >= MATTERS_SHARE]
    concurrent = {
        "data loading": loads_ahead,
        "launch-bound": launching >= MATTERS_SHARE,
    }
    first = [one for one in large if concurrent.get(one.cause)]
    limit = next(iter([*first, *large]), None)
    if limit is None:
        decided = all(
            (one.share if one.high is None else one.high) < MATTERS_SHARE
            for one in losses
        )
    else:
        low = limit.share * UNCERTAIN_SHARE if limit.low is None else limit.low
        others = [] if first else [one.share for one in losses if one is not limit]
        decided = low >= MATTERS_SHARE and low > max(others, default=0.0)
    known = None if mfu is None else mfu.interval()
    if known is not None and known.low is not None:
        known = replace(known, low=max(0.0, known.low))
    return Bottleneck(
        limit="compute" if limit is None else limit.cause,
        decided=decided,
        parts=tuple(every),
        steps=steps,
        source=source,
        mfu=known,
        untold=tuple(untold),
    )


def _communication_shares(profile: Profile) -> tuple[float, float] | None:
    """Return the shares of a step that gradients and their synchronisation cost.

    Returns:
        The share that waits for gradients, and the share that synchronisation adds to
        compute; None if they were not measured.
    """
    network = profile.evidence.network
    # Your own code does not tell which of the measured synchronisations it uses.
    if network is None or network.compute is None or not profile.has_train:
        return None
    parallel = profile.train.parallel
    same = ("strategy", "gradient_dtype", "bucket_cap_mib")
    for row in network.gradient_syncs:
        share, step_s = row.communication_share, row.step_s
        compute = network.compute
        if (
            share is None
            or step_s is None
            or any(getattr(row, key) != getattr(parallel, key) for key in same)
        ):
            continue
        # The step of the slowest rank without gradient synchronisation.
        one_s = compute.of_rank.forward_backward_s(row.micro_batch_size)
        late = 1 + compute.jitter_share * expected_largest(
            network.nodes * network.ranks_per_node
        )
        alone_s = (
            row.gradient_accumulation_steps * one_s * late + compute.optimizer_step_s
        )
        return share, min(share, max(0.0, 1 - alone_s / step_s))
    return None


def parts_of_steps(
    rows: Sequence[StepRow], source: str, padding_costs: float
) -> list[StepPart]:
    """Return each cause's share of all steps.

    Bounds come from blocks of neighbouring steps.
    """
    whole = _shares(rows, padding_costs)
    each = [_shares([row], padding_costs) for row in rows]
    parts = []
    for cause, share in whole.items():
        count = block_count([one[cause] for one in each])
        means = [
            _shares(block, padding_costs)[cause] for block in split_blocks(rows, count)
        ]
        found = estimate_blocks(share, means, n=len(rows)).interval()
        ends = [
            None if end is None else min(1.0, max(0.0, end))
            for end in (found.low, found.high)
        ]
        parts.append(
            StepPart(cause=cause, share=share, low=ends[0], high=ends[1], source=source)
        )
    return parts


def _shares(rows: Sequence[StepRow], padding_costs: float) -> dict[Cause, float]:
    """Return the share of the steps' time that each cause took.

    Rank 0's wait for others counts as their data loading first, then the slowest rank,
    then the network. A row's figures of all ranks are for an earlier interval, so they
    are compared with that wait on average.
    """
    others_s = sum(row.communication_s or 0.0 for row in rows)
    own_data_s = sum(row.data_wait_s for row in rows)
    longest = [
        row.longest_data_wait_s for row in rows if row.longest_data_wait_s is not None
    ]
    longest_s = len(rows) * statistics.fmean(longest) if longest else 0.0
    others_data_s = min(others_s, max(0.0, longest_s - own_data_s))
    slower_s = _slower_by_rank_s(rows)
    own_slow_s = slower_s.pop(0, 0.0)
    others_slow_s = min(others_s - others_data_s, sum(slower_s.values()))
    # Compute without the delay of a slow rank 0.
    own_s = [
        row.compute_s - (_slower_by_s(row) if row.slowest_rank == 0 else 0.0)
        for row in rows
    ]
    padding_s = sum(
        (1 - row.packing_efficiency) * one_s
        for row, one_s in zip(rows, own_s, strict=True)
    )
    known_s = [
        row.data_wait_s + row.compute_s + (row.communication_s or 0.0) + row.optimizer_s
        for row in rows
    ]
    seconds: dict[Cause, float] = {
        "data loading": own_data_s + others_data_s,
        "straggler": own_slow_s + others_slow_s,
        "network": others_s - others_data_s - others_slow_s,
        "optimizer step": sum(row.optimizer_s for row in rows),
        "padding": padding_costs * padding_s,
        # Time between steps, in Python.
        "launch-bound": sum(
            max(0.0, row.step_s - one_s)
            for row, one_s in zip(rows, known_s, strict=True)
        ),
    }
    whole_s = sum(row.step_s for row in rows) or 1.0
    return {cause: part_s / whole_s for cause, part_s in seconds.items()}


def uneven_share(rows: Sequence[StepRow]) -> float:
    """Return the share of time spent waiting for a slowest rank that changes.

    It is 0 if the number of padded tokens changes, as that explains the waits.
    """
    slower_s = _slower_by_rank_s(rows)
    whole_s = sum(slower_s.values())
    if (
        len({row.padded_tokens for row in rows}) > 1
        or max(slower_s.values(), default=0.0) >= SAME_RANK_SHARE * whole_s
    ):
        return 0.0
    return whole_s / sum(row.step_s for row in rows)


def _slower_by_rank_s(rows: Sequence[StepRow]) -> dict[int, float]:
    """Return the seconds that slow ranks compute longer than the median, by rank."""
    slow = [
        (row.slowest_rank, _slower_by_s(row))
        for row in rows
        if row.slowest_rank is not None
    ]
    found: dict[int, float] = collections.defaultdict(float)
    for rank, slower_s in slow:
        found[rank] += slower_s * len(rows) / len(slow)
    return found


def _slower_by_s(row: StepRow) -> float:
    """Return the seconds that the slowest rank computes longer than the median.

    They count as 0 below ``STRAGGLER_RATIO``.
    """
    ratio = row.slowest_rank_ratio
    if ratio is None or ratio < STRAGGLER_RATIO:
        return 0.0
    # If rank 0 is the slowest, its own compute time includes the delay.
    return (
        row.compute_s * (1 - 1 / ratio)
        if row.slowest_rank == 0
        else (ratio - 1) * row.compute_s
    )
