"""Least time of a phase, and what to say before it begins. Pure."""

import math
from collections.abc import Mapping
from typing import Literal

from autotune.base.units import format_seconds

StageName = Literal[
    "estimate",
    "probe",
    "explore",
    "workers",
    "network",
    "confirm",
    "baseline",
    "report",
]

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


def least_time_text(
    command: str,
    least_by_phase_s: Mapping[StageName, float],
    limit_s: float,
    effect: str,
    *,
    remark: str = "",
) -> str:
    """Return lines on the minimum time of a command, before it begins.

    Args:
        command: Name of the command.
        least_by_phase_s: Minimum seconds of each phase.
        limit_s: Time limit of the command.
        effect: Effect of a limit that is shorter, in words.
        remark: Further words on the minimum time.
    """
    total_s = sum(least_by_phase_s.values())
    text = f"{command}: takes at least {format_seconds(total_s)}"
    if len(least_by_phase_s) > 1:
        phases = ", ".join(
            f"{name} {format_seconds(phase_s)}"
            for name, phase_s in least_by_phase_s.items()
        )
        text += f" ({phases})"
    text += remark
    if total_s > limit_s:
        limit = f"{limit_s:g}s" if limit_s < 60 else f"{limit_s / 60:g}min"
        text += (
            f"\nwarning: --time-limit {limit} is shorter: {effect}\n"
            f"  next: use --time-limit {math.ceil(total_s / 60)}min, or run the same"
            " command again to continue"
        )
    return f"{text}\n"


def sweep_time_text(
    phase: StageName,
    device: Literal["cpu", "cuda"],
    window_s: float,
    limit_s: float,
    *,
    remark: str = "",
) -> str:
    """Return lines on the minimum time of a phase that is run alone.

    Args:
        phase: The phase.
        device: Device of its trials.
        window_s: Least seconds of a window.
        limit_s: Time limit of the command.
        remark: Further words on the minimum time.
    """
    least = {phase: least_s(phase, ASSUMED_TRIAL_S[device], window_s)}
    effect = "it ends without a result unless earlier trials can be reused"
    return least_time_text(phase, least, limit_s, effect, remark=remark)
