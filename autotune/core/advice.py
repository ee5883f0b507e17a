"""Advice: a claim with its evidence, what following it should gain, what it costs, and exactly what to do."""

from dataclasses import dataclass
from typing import Any, Literal

from autotune.core.interval import Interval

Severity = Literal["must", "should", "could", "note"]
"""``must``: the run fails, or is not what it seems. ``should``: a proven or large gain without a change of recipe.
``could``: a gain that is predicted, small, or changes the recipe. ``note``: nothing to do, worth knowing."""
SEVERITIES: tuple[Severity, ...] = ("must", "should", "could", "note")

Benefit = Literal["real tokens/s", "GPU memory", "host memory", "tokens to the same loss", "storage", "GPU-hours"]
"""What a gain is of. More of the first is better, less of all others."""

Unit = Literal["share", "ratio", "tokens/s", "bytes", "bytes/s", "FLOP/s", "s", "tokens", "rows", "count", "W", "°C"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the evidence, with where it comes from."""

    name: str
    value: float
    unit: Unit
    low: float | None = None
    high: float | None = None
    """Bounds; None where it was not repeated."""
    confidence: float | None = None
    """With which they hold it, 0 to 1; None where they are no interval of confidence: what others saw, or readings."""
    n: int | None = None
    """So many readings; None where it was not read but computed."""
    known: Literal["measured", "predicted", "assumed", "allocator"] = "measured"
    """``allocator``: of torch's allocator on a pretended GPU."""
    source: str

    @classmethod
    def of(cls, one: Interval, *, name: str, unit: Unit, source: str, n: int | None = None) -> "Figure":
        """Return a measured figure with its bounds."""
        return cls(
            name=name, value=one.value, unit=unit, low=one.low, high=one.high, confidence=one.confidence, n=n,
            source=source,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What following advice is expected to bring."""

    of: Benefit
    ratio: float
    """To what it is now: 1.3 is 30 % more tokens/s, 0.6 is 40 % less memory."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """With which the bounds hold it, 0 to 1; None where they rest on assumptions as well."""
    known: Literal["measured", "predicted"]

    @classmethod
    def of_rates(cls, one: Interval) -> "Gain":
        """Return a measured gain in real tokens/s with its bounds."""
        return cls(
            of="real tokens/s", ratio=one.value, low=one.low, high=one.high, confidence=one.confidence, known="measured"
        )

    @property
    def speedup(self) -> float:
        """For ranking: how much sooner the run ends; 1 where it does not."""
        if self.of == "real tokens/s":
            return self.ratio
        return 1 / self.ratio if self.of == "tokens to the same loss" and self.ratio > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting of ``[train]`` that the advice would set."""

    key: str
    """Dotted, without ``train``: ``data.loader_workers``."""
    old: Any
    new: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One recommendation."""

    rule: str
    """Names the rule: ``padding``."""
    severity: Severity
    claim: str
    """One sentence, with the figure that carries it."""
    evidence: tuple[Figure, ...]
    gain: Gain | None
    """None where nothing is gained, or nobody could say how much."""
    cost: str
    """What it costs and risks."""
    changes: tuple[Change, ...] = ()
    """Of the profile."""
    command: str | None = None
    """What to run, exactly; None where there is nothing to run."""
    would_change: str
    """What would make this advice wrong."""
    safe: bool = False
    """Whether ``--apply`` writes its changes: the same recipe, no more memory, and nothing to be measured first."""
