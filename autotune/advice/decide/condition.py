"""Advice on the machine and on the measurements themselves."""

import shlex
import statistics

from autotune.advice.decide.context import TrainingContext
from autotune.advice.decide.rule import rule
from autotune.base.units import format_percent
from autotune.base.wording import plural
from autotune.evidence.advice import Advice, EvidenceFigure, figure
from autotune.trials.outcomes import Contaminated
from autotune.trials.values import FinishedTrial


@rule()
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


@rule()
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


@rule()
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


@rule()
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


@rule()
def not_measured(now: TrainingContext) -> Advice | None:
    """Find parts of the tuning that were not measured."""
    missing = [part for part in now.not_judged if part.is_basic]
    if not missing:
        return None
    commands = [part.command for part in missing if part.command is not None]
    return Advice(
        claim=f"not measured: {', '.join(part.part for part in missing)}",
        cost="minutes on this machine",
        command="; then ".join(commands),
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
    others = (trial for trial in now.trials if trial.trial.key not in measured)
    details = [
        (trial, trial.outcome.detail)
        for trial in others
        if isinstance(trial.outcome, Contaminated)
    ]
    void = [
        (trial, detail)
        for trial, detail in details
        if ("slowed down" in detail) == slowed
    ]
    number = figure(
        "discarded trials", len(void), "count", "trial log", n=len(now.trials)
    )
    return [one for one, _ in void], void[-1][1][:200] if void else "", number
