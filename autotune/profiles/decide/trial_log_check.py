"""Comparison of a profile with its trials in the trial log. Pure.

Two checks show an edit: the hash of all trials, and the figures that match no trial.
Figures that are computed from many trials are not compared.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from autotune.evidence.confirm import ConfirmEvidence, SplitRates
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.profiles.checks import TrialLogCheck
from autotune.trials.decide.own_records import own_records
from autotune.trials.job_figures import (
    ShortTrainingFigures,
    StepFigures,
    WindowFigures,
)
from autotune.trials.outcomes import Measured, outcome_from_json
from autotune.trials.trial_log import trial_log_sha256
from autotune.trials.values import TrialRecord

_TOLERANCE = 1e-9
"""Relative tolerance of figures, far above the rounding of a figure that is computed
again from others; files keep all digits."""


def profile_records(
    profile: Profile, records: Sequence[TrialRecord]
) -> tuple[TrialRecord, ...]:
    """Return the trials of the profile's model, dataset, device and sequence length.

    Trials of your own training code may have any sequence length.
    """
    return own_records(records, profile.fingerprint, profile.seq_length_tokens)


def check_trial_log(profile: Profile, records: Sequence[TrialRecord]) -> TrialLogCheck:
    """Compare a profile with its trials in the trial log.

    Args:
        profile: Profile to compare.
        records: All trials of the trial log, also those of other profiles.
    """
    own = profile_records(profile, records)
    # The profile's hash covers its trials up to this time.
    until_utc = profile.provenance.trial_log_until_utc
    covered = own
    if until_utc is not None:
        covered = tuple(record for record in own if record.time_utc <= until_utc)
    unfounded: tuple[str, ...] = ()
    if own:
        unfounded = (
            *_unfounded_memory(profile, covered),
            *_unfounded_step_rates(profile, covered),
            *_unfounded_window_rates(profile, covered),
            *_unfounded_confirmed_rates(profile, covered),
        )
    return TrialLogCheck(
        found=_trial_log_state(profile, own, covered),
        trials=len(covered),
        added=len(own) - len(covered),
        others=len(records) - len(own),
        unfounded=unfounded,
    )


def _trial_log_state(
    profile: Profile,
    own: Sequence[TrialRecord],
    covered: Sequence[TrialRecord],
) -> Literal["same", "differs", "not recomputable", "no trials"]:
    """Compare the hash of a profile's trials with the recorded one.

    Args:
        profile: Profile with the recorded hash.
        own: Trials of the profile, later ones included.
        covered: Trials up to the time that the profile records.
    """
    if not own:
        return "no trials"
    # Profiles of older versions do not record the time of their last trial.
    if profile.provenance.trial_log_until_utc is None:
        return "not recomputable"
    if trial_log_sha256(covered) == profile.provenance.trial_log_sha256:
        return "same"
    return "differs"


def _unfounded_memory(
    profile: Profile, records: Iterable[TrialRecord]
) -> Iterator[str]:
    """Yield the micro-batch sizes of a probe, with their peak, that match no trial."""
    probe = profile.evidence.probe
    if probe is None:
        return
    budget_bytes = profile.constraints.memory_budget_bytes
    steps_within_budget = [
        record
        for record in records
        if record.job == "step"
        and record.measured.get("memory_budget_bytes") == budget_bytes
    ]
    # The largest size and its peak must be figures of the same trial.
    largest_steps = _steps(steps_within_budget, probe.feasible_max)
    if probe.feasible_peak_bytes not in [step.peak_bytes for step in largest_steps]:
        yield f"evidence.probe.feasible_max = {probe.feasible_max} with its peak"
    too_large = [
        record.measured.get("size")
        for record in steps_within_budget
        if outcome_from_json(record.outcome).kind == "out_of_memory"
    ]
    if probe.infeasible_min is not None and probe.infeasible_min not in too_large:
        yield f"evidence.probe.infeasible_min = {probe.infeasible_min}"


def _unfounded_step_rates(
    profile: Profile, records: Sequence[TrialRecord]
) -> Iterator[str]:
    """Yield the points of a probe's curve whose rate matches no trial."""
    probe = profile.evidence.probe
    if probe is None:
        return
    points = list(probe.curve)
    if probe.sustained is not None:
        points.append(probe.sustained)
    for point in points:
        rates = _padded_rates(_steps(records, point.size))
        if not _is_among(point.units_per_s, rates):
            yield f"evidence.probe.curve at micro-batch size {point.size}"


def _padded_rates(steps: Iterable[StepFigures]) -> list[float]:
    """Return the median tokens/s including padding of each trial with timed steps."""
    rates = []
    for step in steps:
        timed_s = [step_s for step_s in step.step_s if step_s > 0]
        if timed_s:
            rates.append(step.units_per_step / statistics.median(timed_s))
    return rates


def _unfounded_window_rates(
    profile: Profile, records: Iterable[TrialRecord]
) -> Iterator[str]:
    """Yield the rates of a worker sweep that match no trial."""
    workers = profile.evidence.workers
    if workers is None:
        return
    rates = _padded_window_rates(records)
    if not _are_among(workers.cached_units_per_s, rates):
        yield "evidence.workers.cached_units_per_s"
    for row in workers.rows:
        if not _are_among(row.units_per_s, rates):
            yield f"evidence.workers.rows of {row.num_workers}"


def _unfounded_confirmed_rates(
    profile: Profile, records: Sequence[TrialRecord]
) -> Iterator[str]:
    """Yield the rates of a confirmation that match no trial."""
    confirm, probe = profile.evidence.confirm, profile.evidence.probe
    if confirm is None or probe is None:
        return
    for row in confirm.rows:
        if not _is_founded(profile, probe, confirm, row, records):
            yield f"evidence.confirm.rows of micro-batch size {row.micro_batch_size}"
    delivered_rates = [
        ShortTrainingFigures.of(outcome).tokens_per_s or 0.0
        for outcome in _measured(records, "short_training")
    ]
    delivered = confirm.delivered
    if delivered is not None and not _is_among(delivered.tokens_per_s, delivered_rates):
        yield "evidence.confirm.delivered"


def _is_founded(
    profile: Profile,
    probe: ProbeEvidence,
    confirm: ConfirmEvidence,
    row: SplitRates,
    records: Sequence[TrialRecord],
) -> bool:
    """Return whether the rates of a confirmed split match trials."""
    if not profile.has_train:
        rates = [
            WindowFigures.of(outcome).units_per_s
            for outcome in _measured(records, "window")
        ]
        return _are_among(row.tokens_per_s, rates)
    train = profile.train
    non_padding_share = probe.tokens_per_sequence / train.seq_length_tokens
    sequences = (
        row.micro_batch_size * row.gradient_accumulation_steps * confirm.local_ranks
    )
    non_empty_share = train.global_batch_size / sequences
    # The inverse of the rate that a confirmation derives from a window.
    padded = [rate / (non_empty_share * non_padding_share) for rate in row.tokens_per_s]
    return _are_among(padded, _padded_window_rates(records))


def _padded_window_rates(records: Iterable[TrialRecord]) -> list[float]:
    """Return the units/s including padding of each window of training."""
    return [
        WindowFigures.of(outcome).padded_units_per_s
        for outcome in _measured(records, "window")
    ]


def _measured(records: Iterable[TrialRecord], job: str) -> Iterator[Measured]:
    """Yield the outcomes of a job's trials that have figures."""
    for record in records:
        if record.job == job:
            outcome = outcome_from_json(record.outcome)
            if isinstance(outcome, Measured):
                yield outcome


def _steps(records: Iterable[TrialRecord], size: int) -> list[StepFigures]:
    """Return the figures of the step trials that ran with a size."""
    steps = []
    for record in records:
        if record.job != "step" or record.measured.get("size") != size:
            continue
        outcome = outcome_from_json(record.outcome)
        if isinstance(outcome, Measured):
            steps.append(StepFigures.of(outcome))
    return steps


def _are_among(figures: Iterable[float], measured: Sequence[float]) -> bool:
    """Return whether every figure is among the measured ones, up to rounding."""
    return all(_is_among(figure, measured) for figure in figures)


def _is_among(figure: float, measured: Iterable[float]) -> bool:
    """Return whether a figure is among the measured ones, up to rounding."""
    return any(math.isclose(figure, other, rel_tol=_TOLERANCE) for other in measured)
