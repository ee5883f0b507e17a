"""What limits a step: the parts of its time, and the one that costs most beside computing or sets the pace."""

from dataclasses import dataclass, replace
from typing import Literal

from autotune.base.interval import Interval

Cause = Literal["input", "padding", "network", "straggler", "host", "memory", "update", "computation"]
"""What a part of a step's time goes into.

``input``: devices wait for the loader. ``padding``: places that hold nothing are computed. ``network``: ranks wait for
gradients. ``straggler``: all wait for the slowest rank. ``host``: the device waits for the program to hand it work
(launches, Python, transfers and logging between steps). ``memory``: kernels wait for the device's memory.
``update``: clipping and the optimizer. ``computation``: what is left, forward and backward of real tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One part of a step's time."""

    cause: Cause
    share: float
    """Of the step, 0 to 1; all parts of a step add up to 1."""
    low: float | None = None
    high: float | None = None
    """95 % confidence bounds; None where too few steps show a spread."""
    source: str = ""

    def scaled(self, factor: float) -> "StepPart":
        """Return the part times a positive factor, with its bounds."""
        low, high = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return replace(self, share=self.share * factor, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Where a step's time goes, and what limits it."""

    limit: Cause
    """The part that costs most beside computing, or ``computation`` where none costs enough to matter. Of those that
    do, one that sets the pace comes first: a loader, or a program, that is behind the device."""
    decided: bool
    """Whether the interval of the limit lies clear of what would name another one."""
    parts: tuple[StepPart, ...]
    """Largest first."""
    steps: int
    """So many steps, or windows of steps, were looked at."""
    source: str
    mfu: Interval | None = None
    """Model FLOP/s of the device's dense peak; None if the peak is not known."""
    untold: tuple[str, ...] = ()
    """What could not be told from these figures, and what would tell it."""

    def part(self, cause: Cause) -> StepPart | None:
        """The part of a cause; None where it could not be told."""
        return next((one for one in self.parts if one.cause == cause), None)
