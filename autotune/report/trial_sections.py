"""Sections of the report about trials."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.base.document import Block, Missing, Paragraph, table_of
from autotune.base.units import format_bytes, format_seconds
from autotune.base.wording import format_number, plural
from autotune.evidence.profile import Fingerprint, Profile
from autotune.memory.sections.size_reasons import rate_unit
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.reported_profile import ReportedProfile
from autotune.trials.decide.plausibility import has_rate
from autotune.trials.job_figures import StepFigures, WindowFigures
from autotune.trials.outcomes import Measured, Outcome, OutOfMemory, describe
from autotune.trials.values import FinishedTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrialRow:
    """A trial in the table, with the figures that its kind of job has."""

    finished: FinishedTrial
    optimizer_steps: int | None = None
    peak_bytes: int | None = None
    padded_tokens_per_s: float | None = None

    @property
    def steps_text(self) -> str | None:
        return None if self.optimizer_steps is None else str(self.optimizer_steps)

    @property
    def rate_text(self) -> str | None:
        if self.padded_tokens_per_s is None:
            return None
        return format_number(self.padded_tokens_per_s)


def trials_section(reported: ReportedProfile) -> tuple[Block, ...]:
    """Return the table of all trials, in the order in which they were measured.

    Notes on ignored entries of the trial log come first.
    """
    notes = _ignored_entries(reported)
    if not reported.trials:
        command = probe_command(reported.profile, reported.path)
        return (
            *notes,
            Missing(subject="Trials (none in the trial log)", commands=(command,)),
        )
    fingerprint = reported.profile.fingerprint
    rows = [_trial_row(finished, fingerprint) for finished in reported.trials]
    peak_header = "peak memory"
    if fingerprint.bytes_known != "measured":
        peak_header = "peak memory, allocator"
    table = table_of(
        "Trials",
        rows,
        ("trial", "l", lambda row: row.finished.label),
        ("kind", "l", lambda row: row.finished.trial.job),
        ("outcome", "l", lambda row: describe(row.finished.outcome)),
        ("ranks", "r", lambda row: str(row.finished.trial.ranks)),
        ("optimizer steps", "r", lambda row: row.steps_text),
        (peak_header, "r", lambda row: format_bytes(row.peak_bytes)),
        (rate_unit(reported.profile), "r", lambda row: row.rate_text),
        ("time", "r", lambda row: format_seconds(row.finished.seconds)),
        ("detail", "l", lambda row: _failure_detail(row.finished.outcome)),
        long=True,
    )
    return (*notes, table, *_unlimited_peaks(reported.profile, rows))


def _unlimited_peaks(profile: Profile, rows: Sequence[_TrialRow]) -> tuple[Block, ...]:
    """Return a note on peaks above the memory budget, if there are any.

    On a CPU only trials of fit have a limit: the allocator settings that make it exact
    slow others down.
    """
    budget_bytes = profile.constraints.memory_budget_bytes
    if budget_bytes is None:
        return ()
    exceeding = [
        row
        for row in rows
        if row.peak_bytes is not None
        and row.peak_bytes > budget_bytes
        and row.finished.trial.measured.get("memory_budget_bytes") is None
    ]
    if profile.fingerprint.device != "cpu" or not exceeding:
        return ()
    return (
        Paragraph(
            words=(
                f"{plural(len(exceeding), 'trial')} peaked above the budget of"
                f" {format_bytes(budget_bytes)}: on a CPU, trials that measure speed"
                " run without the limit, because the allocator settings that make it"
                " exact slow them down. Which sizes fit was decided by trials under"
                " the limit.",
            )
        ),
    )


def _ignored_entries(reported: ReportedProfile) -> tuple[Paragraph, ...]:
    """Return notes on the entries of the trial log that were ignored, if any."""
    notes = []
    if reported.corrupt_lines:
        notes.append(
            f"Unreadable lines of the trial log, ignored: {reported.corrupt_lines}."
        )
    check = reported.trial_log
    if check is not None and check.others:
        notes.append(
            f"Trials of another profile with the same name, ignored: {check.others}."
        )
    return tuple(Paragraph(words=(note,)) for note in notes)


def _failure_detail(outcome: Outcome) -> str:
    """Return the cause of a failure; empty if the trial answered its question."""
    # A trial that runs out of memory answers whether its size fits.
    if isinstance(outcome, Measured | OutOfMemory):
        return ""
    return outcome.detail


def _trial_row(finished: FinishedTrial, fingerprint: Fingerprint) -> _TrialRow:
    """Return the row of a trial, with those figures that its job measured."""
    outcome = finished.outcome
    if not isinstance(outcome, Measured):
        return _TrialRow(finished=finished)
    if finished.trial.job == "step":
        row = _step_row(finished, StepFigures.of(outcome))
    elif finished.trial.job == "window":
        row = _window_row(finished, WindowFigures.of(outcome))
    else:
        return _TrialRow(finished=finished)
    is_rated = has_rate(finished.trial, outcome, fingerprint.gpu)
    return row if is_rated else replace(row, padded_tokens_per_s=None)


def _step_row(finished: FinishedTrial, step: StepFigures) -> _TrialRow:
    padded_tokens_per_s = None
    median_s = statistics.median(step.step_s) if step.step_s else 0.0
    if median_s > 0:
        padded_tokens_per_s = step.units_per_step / median_s
    return _TrialRow(
        finished=finished,
        optimizer_steps=step.optimizer_steps,
        peak_bytes=step.peak_bytes,
        padded_tokens_per_s=padded_tokens_per_s,
    )


def _window_row(finished: FinishedTrial, window: WindowFigures) -> _TrialRow:
    return _TrialRow(
        finished=finished,
        optimizer_steps=window.optimizer_steps,
        peak_bytes=window.memory_bytes,
        padded_tokens_per_s=window.padded_units_per_s,
    )
