"""Advice: a claim with its evidence, what following it should gain, what it costs, and exactly what to do."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, Unpack

from autotune.base.interval import Interval

Cause = Literal[
    "data loading", "padding", "network", "straggler", "launch-bound", "memory", "optimizer step", "compute"
]
"""Name the cause of a part of a step's time.

``data loading``: devices wait for the loader. ``padding``: positions that hold nothing are computed. ``network``: ranks
wait for gradients. ``straggler``: all wait for the slowest rank. ``launch-bound``: the device waits for the program to
hand it work (launches, Python, transfers and logging between steps). ``memory``: kernels wait for the device's memory.
``optimizer step``: clipping and the optimizer. ``compute``: the rest, forward and backward of non-padding tokens.
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
    """The part that costs most beside computing, or ``compute`` where none costs enough to matter. Of those that
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


Severity = Literal["must", "should", "could", "note"]
"""``must``: the run fails, or is not what it seems. ``should``: a proven or large gain without a change of recipe.
``could``: a gain that is predicted, small, or changes the recipe. ``note``: nothing to do, worth knowing."""
SEVERITIES: tuple[Severity, ...] = ("must", "should", "could", "note")

Benefit = Literal["real tokens/s", "GPU memory", "host memory", "tokens to the same loss", "storage", "GPU-hours"]
"""What a gain is of. More of the first is better, less of all others."""

Unit = Literal["share", "ratio", "tokens/s", "bytes", "bytes/s", "FLOP/s", "s", "tokens", "rows", "count", "W", "°C"]

Known = Literal["measured", "predicted", "assumed", "allocator"]
"""``allocator``: of torch's allocator on a pretended GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFigure(Interval):
    """One figure of the evidence, with where it comes from; bounds without a confidence are a range of readings."""

    name: str
    unit: Unit
    n: int | None = None
    """Number of readings; None if it was computed."""
    known: Known = "measured"
    source: str


class _Known(TypedDict, total=False):
    n: int | None
    known: Known


def figure(name: str, value: float | Interval, unit: Unit, source: str, **more: Unpack[_Known]) -> EvidenceFigure:
    """Return a figure of the evidence, with the bounds of its value if it has them."""
    one = value if isinstance(value, Interval) else Interval(value=float(value))
    bounds = {end.name: getattr(one, end.name) for end in fields(Interval)}
    return EvidenceFigure(name=name, unit=unit, source=source, **bounds, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What following advice is expected to bring."""

    of: Benefit = "real tokens/s"
    ratio: float
    """To what it is now: 1.3 is 30 % more tokens/s, 0.6 is 40 % less memory."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """Of the bounds, 0 to 1; None if they rest on assumptions as well."""
    known: Literal["measured", "predicted"] = "predicted"

    @classmethod
    def between(cls, low: float, usual: float, high: float) -> "Gain":
        """Return a predicted gain in tokens/s."""
        return cls(ratio=usual, low=low, high=high)

    @classmethod
    def measured(cls, one: Interval) -> "Gain":
        """Return a measured gain in tokens/s with its bounds."""
        return cls(ratio=one.value, low=one.low, high=one.high, confidence=one.confidence, known="measured")

    @property
    def speedup(self) -> float:
        """For ranking: how much sooner the run ends; 1 where it does not."""
        if self.of == "real tokens/s":
            return self.ratio
        return 1 / self.ratio if self.of == "tokens to the same loss" and self.ratio > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One setting of ``[train]`` that the advice would set."""

    key: str
    """Dotted, without ``train``: ``data.num_workers``."""
    old: Any
    new: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One recommendation."""

    rule: str = ""
    """Name of the rule, such as ``padding``; the table of rules sets it."""
    severity: Severity = "should"
    claim: str
    """One sentence, with the figure that carries it."""
    evidence: tuple[EvidenceFigure, ...] = ()
    gain: Gain | None = None
    """None if there is none, or if its size is not known."""
    cost: str
    changes: tuple[SettingChange, ...] = ()
    """Of the profile."""
    command: str | None = None
    would_change: str
    safe: bool = False
    """Whether ``--apply`` writes its changes: the same recipe, no more memory, and nothing to be measured first."""
