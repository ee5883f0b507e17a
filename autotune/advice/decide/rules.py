"""All rules of `advise`, and their recommendations ordered by expected gain. Pure."""

import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.advice.decide import batch_size, communication, computation, data_loading
from autotune.advice.decide.context import TrainingContext
from autotune.advice.values import SEVERITIES, Advice, EvidenceFigure, figure
from autotune.base.units import percent
from autotune.trials.values import Contaminated, FinishedTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRule:
    """Rule that checks a training for one possible problem."""

    name: str
    looks: Callable[[TrainingContext], Advice | None]
    covers: tuple[str, ...] = ()
    """Recommendations of the paper (``R1`` to ``R5``) and bottlenecks that the rule covers."""

    @property
    def looks_for(self) -> str:
        """One-line description of the problem that the rule looks for."""
        return (self.looks.__doc__ or "").splitlines()[0]


def thermal(now: TrainingContext) -> Advice | None:
    """Find trials that are invalid because heat or hardware slowed the GPU down."""
    hot = _void_at_last(now, slowed=True)
    if not hot:
        return None
    measured = sum(trial.outcome.kind == "measured" for trial in now.trials)
    lost_s = sum(trial.seconds for trial in hot)
    return Advice(
        severity="error",
        claim=f"the GPU throttled in {len(hot)} of {len(hot) + measured} trials: {_detail(hot)}",
        evidence=(_void(hot, now), figure("time lost in these trials", lost_s, "s", "trial log")),
        cost="another node, or better cooling of this one",
        command="autotune doctor",
        would_change="throttling by the power cap only, which is normal under full load",
    )


def other_gpu_users(now: TrainingContext) -> Advice | None:
    """Find trials that are invalid because other processes used the GPU."""
    shared = _void_at_last(now, slowed=False)
    if not shared:
        return None
    return Advice(
        claim=f"another process used the GPU in {len(shared)} trials: {_detail(shared)}",
        evidence=(_void(shared, now),),
        cost="an exclusive node; with SLURM, set --exclusive in the site file",
        command="autotune doctor",
        would_change="nothing: measurements on a shared GPU are not valid",
    )


def utilisation(now: TrainingContext) -> Advice | None:
    """Find GPU utilisation near 100 % at a low MFU: kernels that wait count as utilisation."""
    rows = now.workers.rows if now.workers is not None else []
    read = [row.gpu.utilisation_share for row in rows if row.gpu is not None and row.gpu.utilisation_share is not None]
    busy, mfu = statistics.median(read) if read else 0.0, now.mfu_figure()
    if busy < 0.9 or mfu is None or mfu.value >= 0.35:
        return None
    return Advice(
        severity="info",
        claim=f"GPU utilisation is {percent(busy)} although MFU is {percent(mfu.value)}: utilisation counts the time "
        "in which any kernel runs, and not how much it computes",
        evidence=(figure("utilisation", busy, "share", "NVML"), mfu),
        cost="none",
        would_change="an MFU above a third, which is near the best for encoders of this size",
    )


def edited(now: TrainingContext) -> Advice | None:
    """Find a profile that was edited after it was measured."""
    if now.profile is None or now.intact:
        return None
    return Advice(
        severity="error",
        claim="the profile was modified after it was measured: its figures and this advice are for the old settings",
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


def _void_at_last(now: TrainingContext, *, slowed: bool) -> list[FinishedTrial]:
    """Return invalid trials without a valid retry; ``slowed`` selects those of a throttled GPU, or the others."""
    measured = {trial.trial.key for trial in now.trials if trial.outcome.kind == "measured"}
    void = [one for one in now.trials if isinstance(one.outcome, Contaminated) and one.trial.key not in measured]
    return [one for one in void if ("slowed down" in getattr(one.outcome, "detail", "")) == slowed]


def _detail(trials: list[FinishedTrial]) -> str:
    return str(getattr(trials[-1].outcome, "detail", ""))[:200]


def _void(trials: list[FinishedTrial], now: TrainingContext) -> EvidenceFigure:
    return figure("discarded trials", len(trials), "count", "trial log", n=len(now.trials))


RULES = (
    AdviceRule(name="tokenise-ahead", looks=data_loading.tokenise_ahead, covers=("R1", "data loading")),
    AdviceRule(name="staging", looks=data_loading.staging, covers=("R2", "data loading")),
    AdviceRule(name="more-workers", looks=data_loading.more_workers, covers=("R3", "data loading")),
    AdviceRule(name="starved-rank", looks=data_loading.starved_rank, covers=("data loading",)),
    AdviceRule(name="fewer-workers", looks=data_loading.fewer_workers, covers=("R3",)),
    AdviceRule(name="undecided-workers", looks=data_loading.undecided_workers, covers=("R3",)),
    AdviceRule(name="beyond-memory", looks=batch_size.beyond_memory, covers=("R5",)),
    AdviceRule(name="below-knee", looks=batch_size.below_knee, covers=("R5", "launch-bound")),
    AdviceRule(name="beyond-knee", looks=batch_size.beyond_knee, covers=("R5",)),
    AdviceRule(name="beyond-noise-scale", looks=batch_size.beyond_noise_scale),
    AdviceRule(name="padding", looks=batch_size.padding, covers=("padding",)),
    AdviceRule(name="empty-rows", looks=batch_size.empty_rows, covers=("padding",)),
    AdviceRule(name="full-precision", looks=computation.full_precision, covers=("compute", "memory")),
    AdviceRule(name="half-precision", looks=computation.half_precision),
    AdviceRule(name="dense-head", looks=computation.dense_head, covers=("compute",)),
    AdviceRule(name="dense-last-layer", looks=computation.dense_last_layer, covers=("compute",)),
    AdviceRule(name="attention-dropout", looks=computation.attention_dropout, covers=("compute",)),
    AdviceRule(name="launch-bound", looks=computation.launch_bound, covers=("launch-bound",)),
    AdviceRule(name="eager-layers", looks=computation.eager_layers, covers=("launch-bound", "memory")),
    AdviceRule(name="recomputation", looks=computation.recomputation, covers=("compute",)),
    AdviceRule(name="memory-bound", looks=computation.memory_bound, covers=("memory",)),
    AdviceRule(name="optimizer-bound", looks=computation.optimizer_bound, covers=("optimizer step",)),
    AdviceRule(name="compute-bound", looks=computation.compute_bound, covers=("compute",)),
    AdviceRule(name="too-big-for-ddp", looks=batch_size.too_big, covers=("R5",)),
    AdviceRule(name="gradient-sync", looks=communication.gradient_sync, covers=("R4", "network")),
    AdviceRule(name="network-bound", looks=communication.network_bound, covers=("R4", "network")),
    AdviceRule(name="too-many-nodes", looks=communication.too_many_nodes, covers=("R4", "network")),
    AdviceRule(name="below-t-min", looks=communication.below_t_min, covers=("R4", "network")),
    AdviceRule(name="slow-rank", looks=communication.slow_rank, covers=("straggler",)),
    AdviceRule(name="uneven-ranks", looks=communication.uneven_ranks, covers=("straggler",)),
    AdviceRule(name="slow-link", looks=communication.slow_link, covers=("network",)),
    AdviceRule(name="thermal", looks=thermal),
    AdviceRule(name="other-gpu-users", looks=other_gpu_users),
    AdviceRule(name="utilisation", looks=utilisation),
    AdviceRule(name="edited", looks=edited),
    AdviceRule(name="not-measured", looks=not_measured),
)
NOTHING, TOO_LITTLE = "change-nothing", "too-little-known"


def advise(now: TrainingContext) -> tuple[Advice, ...]:
    """Return all advice, ordered by ``rank``; if none asks for a change, it includes an info that says so."""
    found = [replace(advice, rule=rule.name) for rule in RULES if (advice := rule.looks(now)) is not None]
    if not now.intact:  # its figures are for other settings
        found = [replace(one, safe=False) for one in found]
    if all(one.severity == "info" for one in found):
        found.append(_nothing_to_do(now))
    return tuple(sorted(found, key=rank))


def rank(advice: Advice) -> tuple[bool, float, int]:
    """Return a sort key: ``error`` first, then the largest speedup, then the severity."""
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
            would_change="a sweep of DataLoader workers or a longer run: both measure the parts of a step",
        )
    largest = now.bottleneck.parts[:1]
    return Advice(
        rule=NOTHING,
        severity="info",
        claim="no change is expected to pay",
        evidence=tuple(now.part_figure(one, f"largest part of the step: {one.cause}") for one in largest),
        cost="none",
        command=None if now.profile is None else now.command("train"),
        would_change="another machine, model or dataset, or further measurements",
    )
