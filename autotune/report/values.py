"""Inputs of a report: profiles with their trials, and training runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.evidence.advice import Advice, Bottleneck
from trainer.formats.run_record import Run

MatchedBy = Literal["the profile's hash", "dataset and model"]
"""Criterion that matches a run with the profile it was started from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A training run, and the profile it was started from if that is in the report."""

    run: Run
    profile_path: Path | None
    matched_by: MatchedBy | None = None
    """Criterion that matched the profile; None without a profile."""
    other_settings: tuple[str, ...] = ()
    """Differences from the profile's training step, because of which its expectations
    do not apply to the run."""
    bottlenecks: tuple[Bottleneck, ...] = ()
    advice: tuple[Advice, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run in the report."""
        return self.run.directory.name or str(self.run.directory)
