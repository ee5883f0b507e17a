"""All rules of `advise`, and their recommendations ordered by expected gain. Pure."""

import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.advice.decide import (
    batch_size,
    communication,
    computation,
    data_loading,
    kernels,
)
from autotune.advice.decide.context import TrainingContext
from autotune.base.severity import SEVERITIES
from autotune.base.units import format_percent
from autotune.base.wording import plural
from autotune.evidence.advice import Advice, EvidenceFigure, figure
from autotune.kernels.decide.bounds import NEAR_BOUND_RATIO, is_near_bound
from autotune.kernels.decide.words import bound_words
from autotune.trials.outcomes import Contaminated
from autotune.trials.values import FinishedTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRule:
    """Rule that checks a training for one possible problem."""

    name: str
    covers: tuple[str, ...]
    """Recommendations of the paper (``R1`` to ``R5``) and bottlenecks that the rule
    covers."""
    looks_for: str
    looks: Callable[[TrainingContext], Advice | None]


def thermal(now: TrainingContext) -> Advice | None:
    """Find trials that are invalid because heat or hardware slowed the GPU down."""
    hot, detail, discarded = _void_at_last(now, slowed=True)
    if not hot:
        return None
    measured = sum(trial.outcome.kind == "measured" for trial in now.trials)
    lost_s = sum(trial.seconds for trial in hot)
    return Advice(
        severity="error",
        claim=(
            f"the GPU throttled in {len(hot)} of {len(hot) + measured} trials: {detail}"
        ),
        evidence=(
            discarded,
            figure("time lost in these trials", lost_s, "s", "trial log"),
        ),
        cost="another node, or better cooling of this one",
        command="autotune doctor",
        would_change=(
            "throttling by the power cap only, which is normal under full load"
        ),
    )


def other_gpu_users(now: TrainingContext) -> Advice | None:
    """Find trials that are invalid because other processes used the GPU."""
    shared, detail, discarded = _void_at_last(now, slowed=False)
    if not shared:
        return None
    return Advice(
        claim=(
            f"another process used the GPU in {plural(len(shared), 'trial')}: {detail}"
        ),
        evidence=(discarded,),
        cost="an exclusive node; with SLURM, set --exclusive in the site file",
        command="autotune doctor",
        would_change="nothing: measurements on a shared GPU are not valid",
    )


def utilisation(now: TrainingContext) -> Advice | None:
    """Find GPU utilisation near 100 % at a low MFU, as waiting kernels count."""
    rows = now.evidence.workers.rows if now.evidence.workers is not None else []
    read = [
        row.gpu.utilisation_share
        for row in rows
        if row.gpu is not None and row.gpu.utilisation_share is not None
    ]
    busy, mfu = statistics.median(read) if read else 0.0, now.mfu_figure()
    if busy < 0.9 or mfu is None or mfu.value >= 0.35:
        return None
    return Advice(
        severity="info",
        claim=(
            f"GPU utilisation is {format_percent(busy)} although MFU is"
            f" {format_percent(mfu.value)}: utilisation counts the time"
            " in which any kernel runs, and not how much it computes"
        ),
        evidence=(figure("utilisation", busy, "share", "NVML"), mfu),
        cost="none",
        would_change=(
            "an MFU above a third, which is near the best for encoders of this size"
        ),
    )


def edited(now: TrainingContext) -> Advice | None:
    """Find a profile that was edited after it was measured."""
    if now.profile is None or now.intact:
        return None
    return Advice(
        severity="error",
        claim=(
            "the profile was modified after it was measured: its figures and this"
            " advice are for the old settings"
        ),
        cost="another tuning",
        command=shlex.join(["autotune", "profile", "verify", now.profile_path]),
        would_change="nothing: measure the new settings",
    )


def not_measured(now: TrainingContext) -> Advice | None:
    """Find parts of the tuning that were not measured."""
    if not now.missing:
        return None
    return Advice(
        claim=f"not measured: {', '.join(name for name, _ in now.missing)}",
        cost="minutes on this machine",
        command="; then ".join(command for _, command in now.missing),
        would_change="nothing: advice needs these measurements",
    )


def _void_at_last(
    now: TrainingContext, *, slowed: bool
) -> tuple[list[FinishedTrial], str, EvidenceFigure]:
    """Return invalid trials without a valid retry.

    Args:
        now: The training.
        slowed: True for trials of a throttled GPU, False for all others.

    Returns:
        The trials, the detail of the last one, and their number as evidence.
    """
    measured = {
        trial.trial.key for trial in now.trials if trial.outcome.kind == "measured"
    }
    others = (one for one in now.trials if one.trial.key not in measured)
    details = [
        (one, one.outcome.detail)
        for one in others
        if isinstance(one.outcome, Contaminated)
    ]
    void = [
        (one, detail) for one, detail in details if ("slowed down" in detail) == slowed
    ]
    number = figure(
        "discarded trials", len(void), "count", "trial log", n=len(now.trials)
    )
    return [one for one, _ in void], void[-1][1][:200] if void else "", number


_COVERS: dict[Callable[[TrainingContext], Advice | None], str] = {
    data_loading.tokenise_ahead: "R1, data loading",
    data_loading.staging: "R2, data loading",
    data_loading.more_workers: "R3, data loading",
    data_loading.starved_rank: "data loading",
    data_loading.fewer_workers: "R3",
    data_loading.undecided_workers: "R3",
    data_loading.contradicted_utilisation: "",
    batch_size.beyond_memory: "R5",
    batch_size.below_knee: "R5, launch-bound",
    batch_size.beyond_knee: "R5",
    batch_size.beyond_noise_scale: "",
    batch_size.padding: "padding",
    batch_size.empty_rows: "padding",
    computation.full_precision: "compute, memory",
    computation.half_precision: "",
    computation.dense_head: "compute",
    computation.dense_last_layer: "compute",
    computation.attention_dropout: "compute",
    computation.launch_bound: "launch-bound",
    computation.eager_layers: "launch-bound, memory",
    computation.recomputation: "compute",
    computation.memory_bound: "memory",
    computation.optimizer_bound: "optimizer step",
    computation.compute_bound: "compute",
    kernels.far_kernel: "compute, memory",
    kernels.throughput_dip: "compute",
    batch_size.too_big_for_ddp: "R5",
    communication.gradient_sync: "R4, network",
    communication.network_bound: "R4, network",
    communication.too_many_nodes: "R4, network",
    communication.below_t_min: "R4, network",
    communication.slow_rank: "straggler",
    communication.uneven_ranks: "straggler",
    communication.slow_link: "network",
    thermal: "",
    other_gpu_users: "",
    utilisation: "",
    edited: "",
    not_measured: "",
}
RULES = tuple(
    AdviceRule(
        name=one.__name__.replace("_", "-"),
        covers=tuple(filter(None, covers.split(", "))),
        looks_for=(one.__doc__ or "").splitlines()[0],
        looks=one,
    )
    for one, covers in _COVERS.items()
)
NOTHING = "change-nothing"
"""Name of the result that no change is expected to pay."""
NOT_JUDGED = "not-judged"
"""Name of the result that no rule asks for a change, while the step may have room."""
TOO_LITTLE = "too-little-known"
"""Name of the result that too little was measured."""


def advise(now: TrainingContext) -> tuple[Advice, ...]:
    """Return all advice, ordered by ``rank``.

    If no advice asks for a change, an info says so. Rules that recommend the same
    change give one recommendation, with the evidence of all of them.
    """
    found = [
        replace(advice, rule=rule.name)
        for rule in RULES
        if (advice := rule.looks(now)) is not None
    ]
    if not now.intact:  # its figures are for other settings
        found = [replace(one, safe=False) for one in found]
    if all(one.severity == "info" for one in found):
        found.append(_nothing_to_do(now))
    first_by_target: dict[tuple[str, ...], Advice] = {}
    for advice in sorted(found, key=rank):
        first = first_by_target.setdefault(advice.target, advice)
        if first is not advice:
            added = [one for one in advice.evidence if one not in first.evidence]
            first_by_target[advice.target] = replace(
                first, evidence=(*first.evidence, *added)
            )
    return tuple(first_by_target.values())


def rank(advice: Advice) -> tuple[bool, float, int]:
    """Return a sort key: errors first, then the largest speedup, then the severity."""
    speedup = 1.0 if advice.gain is None else advice.gain.speedup
    return advice.severity != "error", -speedup, SEVERITIES.index(advice.severity)


def _nothing_to_do(now: TrainingContext) -> Advice:
    if now.bottleneck is None or not now.bottleneck.decided:
        return Advice(
            rule=TOO_LITTLE,
            severity="info",
            claim="the bottleneck is not known: too little was measured",
            cost="minutes on this machine",
            command=now.command("workers") if now.run is None else None,
            would_change=(
                "a sweep of DataLoader workers or a longer run: both measure the parts"
                " of a step"
            ),
        )
    largest = now.bottleneck.parts[0]
    evidence = now.part_figure(largest, f"largest part of the step: {largest.cause}")
    step = now.step_kernels
    if step is None or not is_near_bound(step):
        return _not_judged(now, evidence)
    return Advice(
        rule=NOTHING,
        severity="info",
        claim=f"no change is expected to pay: {bound_words(step)}",
        evidence=(evidence,),
        cost="none",
        command=None if now.profile is None else now.command("train"),
        would_change="another machine, model or dataset, or further measurements",
    )


def _not_judged(now: TrainingContext, evidence: EvidenceFigure) -> Advice:
    """Return that no rule asks for a change, and what keeps it from being the last."""
    step = now.step_kernels
    if step is None:
        reason = "the kernels of the step were not profiled (autotune tune does it)"
    else:
        reason = bound_words(step)
    return Advice(
        rule=NOT_JUDGED,
        severity="info",
        claim=(
            "no rule asks for a change; whether the step could be faster is not"
            f" judged: {reason}"
        ),
        evidence=(evidence,),
        cost="none",
        command=None if now.profile is None else now.command("train"),
        would_change=(
            "a step within"
            f" {format_percent(NEAR_BOUND_RATIO - 1)} of the sum of its kernels' bounds"
        ),
    )
