"""Advice on what is wrong with a machine, a profile or what people read into figures."""

import shlex
import statistics

from autotune.core.advice import Advice, EvidenceFigure, figure
from autotune.core.outcome import Contaminated
from autotune.core.trial import FinishedTrial
from autotune.decide.advice.situation import Situation

BUSY_SHARE, LOW_MFU = 0.9, 0.35
SLOWED = "slowed down"
"""In the words of trials that heat or hardware spoiled."""


def thermal(now: Situation) -> Advice | None:
    """Trials that were void because heat or hardware slowed the GPU down."""
    hot = _void_at_last(now, slowed=True)
    if not hot:
        return None
    measured = sum(trial.outcome.kind == "measured" for trial in now.trials)
    lost_s = sum(trial.seconds for trial in hot)
    return Advice(
        severity="must",
        claim=f"the GPU slowed itself down in {len(hot)} of {len(hot) + measured} trials: {_detail(hot)}",
        evidence=(_void(hot, now), figure("time they took", lost_s, "s", "ledger")),
        cost="another node, or a word with whoever cools this one",
        command="autotune doctor",
        would_change="a power cap is no fault: a loaded card lives at it",
    )


def company(now: Situation) -> Advice | None:
    """Trials that were void because somebody else used the GPU."""
    shared = _void_at_last(now, slowed=False)
    if not shared:
        return None
    return Advice(
        claim=f"somebody else used the GPU in {len(shared)} trials: {_detail(shared)}",
        evidence=(_void(shared, now),),
        cost="a node of one's own: with SLURM, --exclusive in the site file",
        command="autotune doctor",
        would_change="nothing: a figure beside a neighbour is a figure of both",
    )


def utilisation(now: Situation) -> Advice | None:
    """Utilisation near 100 % is not the hardware's speed: a waiting kernel counts as well."""
    rows = now.workers.rows if now.workers is not None else []
    read = [row.gpu.utilisation_share for row in rows if row.gpu is not None and row.gpu.utilisation_share is not None]
    busy, mfu = statistics.median(read) if read else 0.0, now.mfu_figure()
    if busy < BUSY_SHARE or mfu is None or mfu.value >= LOW_MFU:
        return None
    return Advice(
        severity="note",
        claim=f"the GPU shows {busy:.0%} utilisation and does {mfu.value:.0%} of the work it could: utilisation is the "
        "share of time with any kernel running, and says nothing of how much it does",
        evidence=(figure("utilisation", busy, "share", "NVML"), mfu),
        cost="none",
        would_change="MFU of a third and more: encoders of this size reach little beyond",
    )


def edited(now: Situation) -> Advice | None:
    """A profile that is not what was measured."""
    if now.profile is None or now.intact:
        return None
    return Advice(
        severity="must",
        claim="the profile was edited by hand: its figures are of what it said before, and so is this advice",
        cost="the tuning, once more",
        command=shlex.join(["autotune", "profile", "verify", now.profile_path]),
        would_change="nothing: measure again what matters",
    )


def not_measured(now: Situation) -> Advice | None:
    """Parts of the tuning that were left out."""
    if not now.missing:
        return None
    return Advice(
        severity="could",
        claim=f"not measured: {', '.join(name for name, _ in now.missing)}",
        cost="minutes of this machine",
        command="; then ".join(command for _, command in now.missing),
        would_change="nothing: what is not measured is not known",
    )


def _void_at_last(now: Situation, *, slowed: bool) -> list[FinishedTrial]:
    """Return void trials that were not measured when they were tried again, by why they are void."""
    measured = {trial.trial.key for trial in now.trials if trial.outcome.kind == "measured"}
    return [
        trial
        for trial in now.trials
        if isinstance(trial.outcome, Contaminated)
        and trial.trial.key not in measured
        and (SLOWED in trial.outcome.detail) == slowed
    ]


def _detail(trials: list[FinishedTrial]) -> str:
    return str(getattr(trials[-1].outcome, "detail", ""))[:200]


def _void(trials: list[FinishedTrial], now: Situation) -> EvidenceFigure:
    return figure("trials that were void", len(trials), "count", "ledger", n=len(now.trials))
