"""Runs with all that a report tells of them: what they kept of what was expected, and what needs attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.decide.drift import Drift, drifts
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from trainer.events import EventRow
from trainer.record import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run with all that is told of it."""

    reported: ReportedRun
    profile: ReportedProfile | None
    drifts: tuple[Drift, ...]
    told: tuple[EventRow, ...]
    """Events that need attention."""


def seen(profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun]) -> list[SeenRun]:
    """Every run, beside its profile."""
    by_path = {one.path: one for one in profiles}
    return [_seen(run, by_path.get(run.profile_path) if run.profile_path else None) for run in reported]


def drifts_of(one: ReportedProfile | None, run: ReportedRun) -> tuple[Drift, ...]:
    """A run against its profile in this report."""
    if one is None:
        return ()
    return drifts(one.profile, run.run, trials=one.trials, intact=one.intact, otherwise=run.otherwise)


def needs_attention(run: Run) -> tuple[EventRow, ...]:
    """Its warnings and errors."""
    return tuple(event for event in run.events if event.level != "info")


def _seen(run: ReportedRun, one: ReportedProfile | None) -> SeenRun:
    return SeenRun(reported=run, profile=one, drifts=drifts_of(one, run), told=needs_attention(run.run))
