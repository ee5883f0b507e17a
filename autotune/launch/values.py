"""The progress of runs and tunings, as their records on disk tell it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A training run."""

    directory: str
    state: str
    """In words, such as ``finished`` or ``running``."""
    job: str | None = None
    """The SLURM job that is queued or running for it; None where there is none, or SLURM cannot be asked."""
    step: int | None = None
    max_steps: int | None = None
    tokens_per_s: float | None = None
    checkpoint: str | None = None
    reason: str | None = None
    seconds_since_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStatus:
    """A tuning, by its trial log."""

    directory: str
    trials: int
    outcomes: Mapping[str, int]
    newest_utc: str | None
    newest: str | None
    damaged_lines: int
