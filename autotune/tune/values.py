"""Phases of a tuning, and its result."""

from dataclasses import dataclass
from typing import Literal

from autotune.trials.decide.least_time import StageName

Status = Literal["waiting", "running", "done", "skipped", "failed", "interrupted"]

REPEATED_PHASES: tuple[StageName, ...] = ("confirm", "baseline")
"""Phases that measure the tuned settings, in their order. They are repeated after a
phase of another job changed these."""
BUDGET_WEIGHTS: dict[StageName, float] = {
    "explore": 4.0,
    "workers": 3.0,
    "network": 3.0,
    "confirm": 2.0,
    "baseline": 1.0,
}
"""Weights by which phases share the time left; others are not bounded. Baseline tunes
nothing, so it has the least."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """One phase of one model, updated while the tuning runs."""

    name: StageName
    model: str
    """Name of the model; empty for the report, which covers all models."""
    status: Status = "waiting"
    summary: str = ""
    """Result of the phase, or the reason why it was skipped or failed."""
    done: float = 0
    expected: float | None = None
    """Expected number of trials; None while it is unknown."""
    note: str = ""
    best: str = ""
    seconds: float = 0.0
    budget_s: float | None = None
    """Time budget in seconds; None if the phase is not bounded."""

    @property
    def over(self) -> bool:
        """True if nothing of the phase is left to do."""
        return self.status in ("done", "skipped", "failed", "interrupted")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """Result of a tuning."""

    profiles: tuple[str, ...]
    report: str | None
    stages: tuple[Stage, ...]
    seconds: float
    seconds_in_children: float
    """Part of ``seconds`` in which trials, their fork server, or ranks were running or
    starting."""
    next_steps: tuple[str, ...] = ()
