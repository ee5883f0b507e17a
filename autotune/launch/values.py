"""Progress of runs and tunings, from their records on disk."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a training run."""

    directory: str
    state: str
    """State, such as ``finished`` or ``running``."""
    job: str | None = None
    """SLURM job that is queued or running for the run; None if there is none, or if SLURM cannot be queried."""
    step: int | None = None
    max_steps: int | None = None
    tokens_per_s: float | None = None
    checkpoint: str | None = None
    reason: str | None = None
    seconds_since_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStatus:
    """State of a tuning, from its trial log."""

    directory: str
    trials: int
    outcomes: Mapping[str, int]
    newest_utc: str | None
    newest: str | None
    corrupt_lines: int
