"""Trials that record what memory consists of, on both sides of a verified limit."""

from dataclasses import dataclass

from autotune.errors import OutOfTime
from autotune.evidence.peak_contents import PeakContents
from autotune.memory.size_search import SizeSearch
from autotune.subjects.decide import error_line
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Measured, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedContents:
    """Contents of memory, as far as they were requested and recorded."""

    largest: PeakContents | None = None
    """At the largest size that fits."""
    refused: PeakContents | None = None
    """At the smallest size that is out of memory."""
    not_recorded: str | None = None
    """Reason for contents that were requested and not recorded."""


def record_contents(search: SizeSearch) -> RecordedContents:
    """Record the contents that ``SizeProbe.contents`` requests.

    A failure is not an error: the sizes are verified without it.
    """
    requested = search.probe.contents
    if requested == "none" or search.probe.in_this_process:
        return RecordedContents()
    largest, reason = _contents_at(search, search.feasible_max, fits=True)
    refused = None
    refused_size = search.infeasible_min
    if requested == "both" and refused_size is not None and reason is None:
        refused, reason = _contents_at(search, refused_size, fits=False)
    return RecordedContents(largest=largest, refused=refused, not_recorded=reason)


def _contents_at(
    search: SizeSearch, size: int, *, fits: bool
) -> tuple[PeakContents | None, str | None]:
    """Return the contents of memory at a size, or the reason for their lack."""
    probe = search.probe
    trial = probe.step_trial(
        size,
        probe.fit_steps,
        # The record is in the host's memory, which is limited on a CPU.
        search.wider_bytes if fits else probe.memory_budget_bytes,
        attribute=True,
    )
    label = f"{search.name}: {probe.words(size)}, contents of memory"
    try:
        outcome = search.runner.run(trial, label)
    except OutOfTime as error:
        return None, error.message
    if not isinstance(outcome, Measured):
        return None, error_line(outcome.detail) or describe(outcome)
    contents = StepFigures.of(outcome).contents
    if contents is None or (contents.refused is None) != fits:
        ended = "fitted" if fits is False else "ran out of memory"
        return None, f"the trial of {probe.words(size)} {ended}"
    return contents, None
