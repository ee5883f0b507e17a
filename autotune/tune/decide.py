"""Time budget of a tuning's phases, and an estimate of the time left. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from autotune.base.units import format_seconds
from autotune.tune.values import BUDGET_WEIGHTS, Stage, StageName

LEAST_WINDOWS: dict[StageName, int] = {
    "explore": 12,
    "workers": 9,
    "network": 6,
    "confirm": 3,
    "baseline": 11,
}
"""Fewest trials of a phase that give a result: three rounds, and those that must come
first."""
ASSUMED_TRIAL_S = {"cpu": 2.0, "cuda": 12.0}
"""Assumed seconds of a trial besides its measurement, by device, until some have
run."""
LEAST_PROBES = 6
"""Fewest trials of a probe: the predicted size, the next one, which does not fit, and a
few timed sizes."""
TRAINING_SHARE = 0.1
"""Share of the time budget for the training that ends the confirm phase."""
MAX_TRAINING_S = 60.0
"""Longest such training, in seconds."""
USUAL_S: dict[StageName, float] = {"estimate": 5.0, "probe": 90.0, "report": 6.0}
"""Assumed seconds of phases without a time budget, until one of the same kind has
run."""


def least_s(name: StageName, trial_s: float, window_s: float) -> float:
    """Return the approximate minimum seconds of a phase.

    ``trial_s`` is a trial's overhead, ``window_s`` the time of a window of the phase.
    """
    if name == "probe":
        return LEAST_PROBES * trial_s
    return (
        LEAST_WINDOWS[name] * (trial_s + window_s)
        if name in LEAST_WINDOWS
        else USUAL_S.get(name, 0.0)
    )


def training_s(budget_s: float, models: int) -> float:
    """Return the time of the training that ends a confirm phase.

    Args:
        budget_s: Time budget of the whole tuning.
        models: Models to tune, which share it.
    """
    return min(MAX_TRAINING_S, TRAINING_SHARE * budget_s / models)


def least_time_text(
    command: str,
    least_by_phase_s: Mapping[StageName, float],
    limit_s: float,
    effect: str,
) -> str:
    """Return lines on the minimum time of a command, before it begins.

    Args:
        command: Name of the command.
        least_by_phase_s: Minimum seconds of each phase.
        limit_s: Time limit of the command.
        effect: Effect of a limit that is shorter, in words.
    """
    total_s = sum(least_by_phase_s.values())
    text = f"{command}: takes at least {format_seconds(total_s)}"
    if len(least_by_phase_s) > 1:
        phases = ", ".join(
            f"{name} {format_seconds(phase_s)}"
            for name, phase_s in least_by_phase_s.items()
        )
        text += f" ({phases})"
    if total_s > limit_s:
        limit = f"{limit_s:g}s" if limit_s < 60 else f"{limit_s / 60:g}min"
        text += (
            f"\nwarning: --time-limit {limit} is shorter: {effect}\n"
            f"  next: use --time-limit {math.ceil(total_s / 60)}min, or run the same"
            " command again to continue"
        )
    return f"{text}\n"


def sweep_time_text(
    phase: StageName, device: Literal["cpu", "cuda"], window_s: float, limit_s: float
) -> str:
    """Return lines on the minimum time of a phase that is run alone."""
    least = {phase: least_s(phase, ASSUMED_TRIAL_S[device], window_s)}
    effect = "it ends without a result unless earlier trials can be reused"
    return least_time_text(phase, least, limit_s, effect)


def share_s(stages: Sequence[Stage], stage: Stage, left_s: float) -> float | None:
    """Return the phase's part of the seconds left, shared with waiting phases.

    Returns:
        The part, or None if it is not bounded.
    """
    weight = BUDGET_WEIGHTS.get(stage.name)
    if weight is None:
        return None
    waiting = [one for one in stages if not one.over and one is not stage]
    total = weight + sum(BUDGET_WEIGHTS.get(one.name, 0.0) for one in waiting)
    fixed_s = sum(
        _usual_s(stages, one.name) for one in waiting if one.name not in BUDGET_WEIGHTS
    )
    return max(0.0, (left_s - fixed_s) * weight / total)


def left_s(stages: Sequence[Stage], budget_left_s: float) -> float:
    """Return the approximate seconds left.

    They are the usual times of unbounded phases, and the budgets of the others.
    """
    rest = 0.0
    for one in (stage for stage in stages if not stage.over):
        may_s = (
            one.budget_s
            if one.budget_s is not None
            else share_s(stages, one, budget_left_s)
        )
        usual_s = _usual_s(stages, one.name) if may_s is None else may_s
        if one.expected and one.done:
            usual_s = min(
                usual_s if may_s is not None else float("inf"),
                one.seconds / one.done * one.expected,
            )
        rest += max(0.0, usual_s - one.seconds)
    return rest


def _usual_s(stages: Sequence[Stage], name: StageName) -> float:
    known = (one.seconds for one in stages if one.name == name and one.status == "done")
    return max(known, default=USUAL_S.get(name, 0.0))
