"""Least time of a window. Pure."""

from typing import Literal

from autotune.evidence.profile import Profile
from autotune.profiles.decide.batch_split import profile_split

MIN_STEPS = 4
"""Fewest optimizer steps of a window."""
WARM_UP_STEPS = {"cpu": 2, "cuda": 3}
"""Steps before a window, by device. The last one shows the speed of steps."""
MOST_MICRO_BATCHES = 4
"""Limit of micro-batches in a step of a window, unless its request sets another one.
The last one synchronises gradients and updates the weights, as in training."""


def known_step_s(
    profile: Profile | None, replayed_step_s: float | None, ranks: int | None
) -> float | None:
    """Return the seconds of an optimizer step of the windows of a sweep.

    Args:
        profile: Profile whose loader is swept; None if there is none yet.
        replayed_step_s: Seconds of a micro-batch that is replayed; None takes those
            that the probe measured at the profile's size.
        ranks: Ranks of the windows; None takes those of the probe.

    Returns:
        The seconds; None if they are not known.
    """
    if profile is None:
        return replayed_step_s
    micro_batch_s, size, probe = replayed_step_s, profile.size, profile.evidence.probe
    if micro_batch_s is None and probe is not None and isinstance(size, int):
        micro_batch_s = probe.step_s_at(size)
    if micro_batch_s is None:
        return None
    split = profile_split(profile, ranks or profile.local_ranks)
    if split is None:
        return micro_batch_s
    return micro_batch_s * min(MOST_MICRO_BATCHES, split.gradient_accumulation_steps)


def least_window_s(
    window_s: float, step_s: float | None, device: Literal["cpu", "cuda"]
) -> float:
    """Return the fewest seconds of a window with its warm-up.

    Args:
        window_s: Requested duration of the window.
        step_s: Duration of a step; None if it is unknown, and taken to be short.
        device: Device of the step.
    """
    if step_s is None:
        return window_s
    return WARM_UP_STEPS[device] * step_s + max(window_s, MIN_STEPS * step_s)


def longer_words(window_s: float, step_s: float | None) -> str:
    """Return the step duration above which windows take longer, if it is unknown.

    Returns:
        Words that follow the least time of a sweep; empty if the step is known.
    """
    if step_s is not None:
        return ""
    return (
        f"; longer if a step takes more than {window_s / MIN_STEPS:g} s, as a window"
        f" has at least {MIN_STEPS} steps"
    )
