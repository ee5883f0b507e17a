"""A whole tuning: its stages, and how each of them stands; and how tunings and runs on disk are doing."""

from dataclasses import dataclass
from typing import Literal

StageName = Literal["estimate", "probe", "explore", "workers", "network", "baseline", "report"]
Status = Literal["waiting", "running", "done", "skipped", "failed"]

BUDGET_WEIGHTS: dict[StageName, float] = {"explore": 4.0, "workers": 3.0, "network": 3.0, "baseline": 1.0}
"""How stages share what is left of the time. The others take what they take. What settings are worth is no tuning, so
that has the smallest part."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """One stage of one model; it changes while the tuning goes on."""

    name: StageName
    model: str
    """Empty for the report, which is of all models."""
    status: Status = "waiting"
    told: str = ""
    """What it came to, or why it was skipped or failed."""
    done: float = 0
    expected: float | None = None
    """Trials; None where nobody can tell yet."""
    note: str = ""
    best: str = ""
    seconds: float = 0.0
    budget_s: float | None = None
    """None where it takes what it takes."""

    @property
    def over(self) -> bool:
        """Whether nothing of it is left to do."""
        return self.status in ("done", "skipped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """What a tuning came to."""

    profiles: tuple[str, ...]
    report: str | None
    stages: tuple[Stage, ...]
    seconds: float
    seconds_in_children: float
    """Of these, while trials, their server, or ranks were running or starting."""
    next_steps: tuple[str, ...] = ()
