"""Least time of a window. Pure."""

from typing import Literal

MIN_STEPS = 4
"""Fewest optimizer steps of a window."""
WARM_UP_STEPS = {"cpu": 2, "cuda": 3}
"""Steps before a window, by device. The last one shows the speed of steps."""


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
