"""Advice on what is wrong with a machine, a profile or what people read into figures."""

from dataclasses import dataclass

from autotune.core.advice import Advice, Figure
from autotune.core.interval import SHOWN_CONFIDENCE
from autotune.core.outcome import Contaminated
from autotune.decide.advice.situation import Situation, middle

BUSY_SHARE, LOW_MFU = 0.9, 0.35
SLOWED = "slowed down"
"""In the words of trials that heat or hardware spoiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidTrial:
    """A trial whose figures do not count."""

    outcome: Contaminated
    seconds: float


def thermal(now: Situation) -> Advice | None:
    """Trials that were void because heat or hardware slowed the GPU down."""
    hot = [trial for trial in _void_at_last(now) if SLOWED in trial.outcome.detail]
    if not hot:
        return None
    measured = sum(trial.outcome.kind == "measured" for trial in now.trials)
    lost = sum(trial.seconds for trial in hot)
    return Advice(
        rule="thermal",
        severity="must",
        claim=f"the GPU slowed itself down in {len(hot)} of {len(hot) + measured} trials: {_detail(hot[-1].outcome)}",
        evidence=(
            _void(len(hot), len(now.trials)),
            Figure(name="time they took", value=lost, unit="s", source="ledger"),
        ),
        gain=None,
        cost="another node, or a word with whoever cools this one",
        command="autotune doctor",
        would_change="a power cap is no fault: a loaded card lives at it",
    )  # fmt: skip


def company(now: Situation) -> Advice | None:
    """Trials that were void because somebody else used the GPU."""
    shared = [trial for trial in _void_at_last(now) if SLOWED not in trial.outcome.detail]
    if not shared:
        return None
    return Advice(
        rule="company",
        severity="should",
        claim=f"somebody else used the GPU in {len(shared)} trials: {_detail(shared[-1].outcome)}",
        evidence=(
            _void(len(shared), len(now.trials)),
        ),
        gain=None,
        cost="a node of one's own: with SLURM, --exclusive in the site file",
        command="autotune doctor",
        would_change="nothing: a figure beside a neighbour is a figure of both",
    )  # fmt: skip


def utilisation(now: Situation) -> Advice | None:
    """Utilisation near 100 % is not the hardware's speed: a waiting kernel counts as well."""
    rows = now.workers.rows if now.workers is not None else []
    busy = middle([row.gpu.utilisation_share for row in rows if row.gpu is not None])
    if busy is None or busy < BUSY_SHARE or now.mfu is None or now.mfu >= LOW_MFU:
        return None
    assert now.bottleneck is not None
    return Advice(
        rule="utilisation",
        severity="note",
        claim=f"the GPU shows {busy:.0%} utilisation and does {now.mfu:.0%} of the work it could: utilisation is the "
        "share of time with any kernel running, and says nothing of how much it does",
        evidence=(
            Figure(name="utilisation", value=busy, unit="share", source="NVML"),
            Figure(
                name="MFU", value=now.mfu, unit="share", low=now.bottleneck.mfu_low, high=now.bottleneck.mfu_high,
                confidence=None if now.bottleneck.mfu_low is None else SHOWN_CONFIDENCE,
                n=now.bottleneck.steps, source=now.bottleneck.source,
            ),
        ),
        gain=None,
        cost="none",
        would_change="MFU of a third and more: encoders of this size reach little beyond",
    )  # fmt: skip


def edited(now: Situation) -> Advice | None:
    """A profile that is not what was measured."""
    if now.profile is None or now.intact:
        return None
    return Advice(
        rule="edited",
        severity="must",
        claim="the profile was edited by hand: its figures are of what it said before, and so is this advice",
        evidence=(),
        gain=None,
        cost="the tuning, once more",
        command=now.command("profile", "verify", now.profile_path),
        would_change="nothing: measure again what matters",
    )


def not_measured(now: Situation) -> Advice | None:
    """Parts of the tuning that were left out."""
    if not now.missing:
        return None
    what = ", ".join(name for name, _ in now.missing)
    commands = "; then ".join(command for _, command in now.missing)
    return Advice(
        rule="not-measured",
        severity="could",
        claim=f"not measured: {what}",
        evidence=(),
        gain=None,
        cost="minutes of this machine",
        command=commands,
        would_change="nothing: what is not measured is not known",
    )


def _void_at_last(now: Situation) -> list[VoidTrial]:
    """Void trials that were not measured when they were tried again."""
    measured = {trial.trial.key for trial in now.trials if trial.outcome.kind == "measured"}
    return [
        VoidTrial(outcome=trial.outcome, seconds=trial.seconds)
        for trial in now.trials
        if isinstance(trial.outcome, Contaminated) and trial.trial.key not in measured
    ]


def _detail(outcome: object) -> str:
    return str(getattr(outcome, "detail", ""))[:200]


def _void(count: int, trials: int) -> Figure:
    return Figure(name="trials that were void", value=float(count), unit="count", n=trials, source="ledger")
