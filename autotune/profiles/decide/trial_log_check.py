"""Comparison of a profile with its trials, and with this machine, model and dataset.

Pure.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from autotune.profiles.values import Check, Fingerprint, Found, Profile, TrialLogCheck
from autotune.trials.trial_log import own_records, trial_log_sha256
from autotune.trials.values import (
    Measured,
    StepFigures,
    TrainingFigures,
    TrialRecord,
    outcome_from_json,
)

if TYPE_CHECKING:
    from autotune.integrations.values import OwnProfile

_TOLERANCE = 1e-9
"""Relative tolerance: files keep all digits of a figure, but figures derived from
others are recomputed."""
_ERROR_FIELDS = ("device", "gpu_name", "gpu_mig", "model_sha256", "dataset_hash")
"""Fields that invalidate the profile's figures if they differ."""
_WARNING_FIELDS = (
    "cpu_model",
    "allotted_cpus",
    "gpu_count",
    "gpu_power_cap_w",
    "driver",
    "cuda",
    "torch",
    "transformers",
    "data_filesystem",
)
"""Fields that may change the profile's figures if they differ."""
_GPU_FIELDS = (
    "device",
    "gpu_name",
    "gpu_count",
    "gpu_total_bytes",
    "gpu_mig",
    "gpu_power_cap_w",
    "driver",
    "cuda",
)
"""Fields that do not matter if the GPU's step is replayed."""
_REPLAY_ERROR_FIELDS = ("cpu_model", "data_filesystem")
"""Fields that invalidate the figures of a replayed step."""
_SEVERITIES: tuple[Found, ...] = ("error", "warning", "info")
"""Severities of a difference, the most severe first."""


def profile_records(
    profile: "Profile | OwnProfile", records: Sequence[TrialRecord]
) -> tuple[TrialRecord, ...]:
    """Return the profile's own trials, at its sequence length if it has one."""
    seq_length_tokens = None
    if isinstance(profile, Profile):
        seq_length_tokens = profile.train.seq_length_tokens
    return own_records(records, profile.fingerprint, seq_length_tokens)


def check_trial_log(
    profile: "Profile | OwnProfile", records: Sequence[TrialRecord]
) -> TrialLogCheck:
    """Compare a profile with its trials in the trial log."""
    own = profile_records(profile, records)
    until_utc = profile.provenance.trial_log_until_utc
    covered = own
    if until_utc is not None:
        covered = tuple(record for record in own if record.time_utc <= until_utc)
    unfounded: tuple[str, ...] = ()
    if own and isinstance(profile, Profile):
        unfounded = (
            *_unfounded_by_steps(profile, covered),
            *_unfounded_by_windows(profile, covered),
        )
    return TrialLogCheck(
        found=_trial_log_state(profile, own, covered),
        trials=len(covered),
        added=len(own) - len(covered),
        others=len(records) - len(own),
        unfounded=unfounded,
    )


def _trial_log_state(
    profile: "Profile | OwnProfile",
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
    # Profiles of older versions do not record up to when trials count.
    if profile.provenance.trial_log_until_utc is None:
        return "not recomputable"
    if trial_log_sha256(covered) == profile.provenance.trial_log_sha256:
        return "same"
    return "differs"


def _unfounded_by_steps(
    profile: Profile, records: Sequence[TrialRecord]
) -> Iterator[str]:
    """Yield the figures of a probe that match no trial.

    Those computed from many trials are left out.
    """
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
    # The largest size and its peak must be of one trial.
    largest_steps = _steps(steps_within_budget, probe.feasible_max)
    if probe.feasible_peak_bytes not in [step.peak_bytes for step in largest_steps]:
        yield f"evidence.probe.feasible_max = {probe.feasible_max} with its peak"
    too_large = [
        _micro_batch_size(record)
        for record in steps_within_budget
        if outcome_from_json(record.outcome).kind == "out_of_memory"
    ]
    if probe.infeasible_min not in (None, *too_large):
        yield f"evidence.probe.infeasible_min = {probe.infeasible_min}"
    points = list(probe.curve)
    if probe.sustained is not None:
        points.append(probe.sustained)
    for point in points:
        rates = _padded_rates(_steps(records, point.micro_batch_size))
        if not _is_among(point.padded_tokens_per_s, rates):
            yield f"evidence.probe.curve at micro-batch size {point.micro_batch_size}"


def _padded_rates(steps: Iterable[StepFigures]) -> list[float]:
    """Return the median tokens/s including padding of each trial with timed steps."""
    rates = []
    for step in steps:
        timed_s = [step_s for step_s in step.step_s if step_s > 0]
        if timed_s:
            rates.append(step.padded_tokens_per_step / statistics.median(timed_s))
    return rates


def _unfounded_by_windows(
    profile: Profile, records: Iterable[TrialRecord]
) -> Iterator[str]:
    """Yield the rates of a worker sweep that match no trial."""
    workers = profile.evidence.workers
    if workers is None:
        return
    rates = []
    for record in records:
        if record.job == "training":
            outcome = outcome_from_json(record.outcome)
            if isinstance(outcome, Measured):
                rates.append(TrainingFigures.of(outcome).padded_tokens_per_s)
    if not _are_among(workers.cached_padded_tokens_per_s, rates):
        yield "evidence.workers.cached_padded_tokens_per_s"
    for row in workers.rows:
        if not _are_among(row.padded_tokens_per_s, rates):
            yield f"evidence.workers.rows of {row.num_workers}"


def _steps(records: Iterable[TrialRecord], micro_batch_size: int) -> list[StepFigures]:
    """Return the figures of the steps with a micro-batch size."""
    steps = []
    for record in records:
        if record.job != "step" or _micro_batch_size(record) != micro_batch_size:
            continue
        outcome = outcome_from_json(record.outcome)
        if isinstance(outcome, Measured):
            steps.append(StepFigures.of(outcome))
    return steps


def _micro_batch_size(record: TrialRecord) -> object:
    return record.trial.config.get("micro_batch_size")


def _are_among(figures: Iterable[float], measured: Sequence[float]) -> bool:
    return all(_is_among(figure, measured) for figure in figures)


def _is_among(figure: float, measured: Iterable[float]) -> bool:
    return any(math.isclose(figure, other, rel_tol=_TOLERANCE) for other in measured)


def compare_fingerprints(
    profile: Fingerprint, here: Fingerprint, *, replayed: bool = False
) -> tuple[Check, ...]:
    """Return every field that differs, most severe first.

    Less GPU memory than the profile's is rejected, more is not.

    Args:
        profile: Fingerprint of the profile.
        here: Fingerprint of this machine.
        replayed: True if a GPU's step is replayed: the GPU is not compared, and CPU and
            file system must match.
    """
    checks = []
    for field in Fingerprint.model_fields:
        recorded = getattr(profile, field)
        present = getattr(here, field)
        if recorded == present or (replayed and field in _GPU_FIELDS):
            continue
        checks.append(
            Check(
                field=field,
                found=_severity(field, recorded, present, replayed=replayed),
                profile=field_text(recorded),
                here=field_text(present),
            )
        )
    return tuple(sorted(checks, key=lambda check: _SEVERITIES.index(check.found)))


def _severity(field: str, recorded: Any, present: Any, *, replayed: bool) -> Found:
    """Return the severity of a field that differs.

    Args:
        field: Name of the field.
        recorded: Value in the profile.
        present: Value on this machine.
        replayed: True if a GPU's step is replayed.
    """
    if field == "gpu_total_bytes" and _is_less(present, recorded):
        return "error"
    if field in _ERROR_FIELDS or (replayed and field in _REPLAY_ERROR_FIELDS):
        return "error"
    if field in _WARNING_FIELDS:
        return "warning"
    return "info"


def _is_less(present_bytes: int | None, recorded_bytes: int | None) -> bool:
    """Return True if there is less memory than recorded; no GPU has none."""
    return (present_bytes or 0) < (recorded_bytes or 0)


def check_fields(
    profile: Fingerprint, here: Fingerprint, unknown: Mapping[str, str]
) -> Iterator[Check]:
    """Compare every field of two fingerprints.

    Args:
        profile: Fingerprint of the profile.
        here: Fingerprint of this machine.
        unknown: Reason of each field that cannot be compared.
    """
    differences = {check.field: check for check in compare_fingerprints(profile, here)}
    for field in Fingerprint.model_fields:
        recorded = field_text(getattr(profile, field))
        if field in unknown:
            yield Check(
                field=field, found="unknown", profile=recorded, here=unknown[field]
            )
        elif field in differences:
            yield differences[field]
        else:
            yield Check(field=field, found="same", profile=recorded, here=recorded)


def field_text(value: object) -> str:
    """Return a field's value as text, at most 64 characters."""
    return "n/a" if value is None else str(value)[:64]
