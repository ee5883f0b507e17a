"""Comparison of a profile with its trials, and with this machine, model and dataset.

Pure.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.profiles.values import Check, Fingerprint, Found, Profile, TrialLogCheck
from autotune.trials.trial_log import own_records, trial_log_sha256
from autotune.trials.values import (
    Measured,
    Outcome,
    StepFigures,
    TrainingFigures,
    TrialRecord,
    outcome_from_json,
)

if TYPE_CHECKING:
    from autotune.integrations.values import OwnProfile

_SAME = 1e-9
"""Relative tolerance: files keep all digits of a figure, but figures derived from
others are recomputed."""
_ERRORS = ("device", "gpu_name", "gpu_mig", "model_sha256", "dataset_hash")
"""Fields that invalidate the profile's figures if they differ."""
_WARNINGS = (
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
_OF_THE_GPU = (
    "device",
    "gpu_name",
    "gpu_count",
    "gpu_total_bytes",
    "gpu_mig",
    "gpu_power_cap_w",
    "driver",
    "cuda",
)
_OF_A_REPLAY = ("cpu_model", "data_filesystem")
_ORDER: tuple[Found, ...] = ("error", "warning", "info")


def profile_records(
    profile: "Profile | OwnProfile", records: Sequence[TrialRecord]
) -> tuple[TrialRecord, ...]:
    """Return the profile's own trials, at its sequence length if it has one."""
    length = profile.train.seq_length_tokens if isinstance(profile, Profile) else None
    return own_records(records, profile.fingerprint, length)


def check_trial_log(
    profile: "Profile | OwnProfile", records: Sequence[TrialRecord]
) -> TrialLogCheck:
    """Compare a profile with its trials in the trial log."""
    own = profile_records(profile, records)
    until = profile.provenance.trial_log_until_utc
    behind = (
        own
        if until is None
        else tuple(record for record in own if record.time_utc <= until)
    )
    is_same = trial_log_sha256(behind) == profile.provenance.trial_log_sha256
    return TrialLogCheck(
        found=(
            "no trials"
            if not own
            else (
                "not recomputable"
                if until is None
                else "same"
                if is_same
                else "differs"
            )
        ),
        trials=len(behind),
        added=len(own) - len(behind),
        others=len(records) - len(own),
        unfounded=(
            tuple(_unfounded(profile, behind))
            if own and isinstance(profile, Profile)
            else ()
        ),
    )


def _unfounded(profile: Profile, behind: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield the figures of a profile that match no trial.

    Those computed from many trials are left out.
    """
    probe, workers = profile.evidence.probe, profile.evidence.workers
    if probe is not None:
        budget = profile.constraints.memory_budget_bytes
        limited = [
            one
            for one in behind
            if one.job == "step" and one.measured.get("memory_budget_bytes") == budget
        ]
        if probe.feasible_peak_bytes not in [
            one.peak_bytes for one in _steps(limited, probe.feasible_max)
        ]:
            yield f"evidence.probe.feasible_max = {probe.feasible_max} with its peak"
        too_large = [
            rows
            for rows, one in _outcomes(limited, "step")
            if one.kind == "out_of_memory"
        ]
        if probe.infeasible_min not in (None, *too_large):
            yield f"evidence.probe.infeasible_min = {probe.infeasible_min}"
        for point in [*probe.curve, *([probe.sustained] if probe.sustained else [])]:
            steps = _steps(behind, point.micro_batch_size)
            timed = [
                (one, [step_s for step_s in one.step_s if step_s > 0]) for one in steps
            ]
            rates = [
                one.padded_tokens_per_step / statistics.median(step_s)
                for one, step_s in timed
                if step_s
            ]
            if not _is_among(point.padded_tokens_per_s, rates):
                yield (
                    f"evidence.probe.curve at micro-batch size {point.micro_batch_size}"
                )
    if workers is not None:
        windows = [
            TrainingFigures.of(one)
            for _, one in _outcomes(behind, "training")
            if isinstance(one, Measured)
        ]
        rates = [one.padded_tokens_per_s for one in windows]
        if not all(
            _is_among(rate, rates) for rate in workers.cached_padded_tokens_per_s
        ):
            yield "evidence.workers.cached_padded_tokens_per_s"
        for row in workers.rows:
            if not all(_is_among(rate, rates) for rate in row.padded_tokens_per_s):
                yield f"evidence.workers.rows of {row.num_workers}"


def _outcomes(
    records: Iterable[TrialRecord], job: str
) -> Iterator[tuple[object, Outcome]]:
    """Yield the micro-batch size and the outcome of each trial of a job."""
    for record in records:
        if record.job == job:
            yield (
                record.trial.config.get("micro_batch_size"),
                outcome_from_json(record.outcome),
            )


def _steps(records: Iterable[TrialRecord], rows: int) -> Iterator[StepFigures]:
    found = _outcomes(records, "step")
    return (
        StepFigures.of(one)
        for size, one in found
        if size == rows and isinstance(one, Measured)
    )


def _is_among(figure: float, found: Iterable[float]) -> bool:
    return any(math.isclose(figure, one, rel_tol=_SAME) for one in found)


def compare_fingerprints(
    profile: Fingerprint, here: Fingerprint, *, replayed: bool = False
) -> tuple[Check, ...]:
    """Return every field that differs, most severe first.

    Less GPU memory than the profile's is rejected, more is not.

    If a GPU's step is replayed, the GPU is not compared, and CPU and file system must
    match.
    """
    found = []
    for field in Fingerprint.model_fields:
        old, new = getattr(profile, field), getattr(here, field)
        if old == new or (replayed and field in _OF_THE_GPU):
            continue
        is_less = field == "gpu_total_bytes" and (new or 0) < (old or 0)
        severity: Found = "warning" if field in _WARNINGS else "info"
        if is_less or field in _ERRORS or (replayed and field in _OF_A_REPLAY):
            severity = "error"
        found.append(
            Check(
                field=field,
                found=severity,
                profile=field_text(old),
                here=field_text(new),
            )
        )
    return tuple(sorted(found, key=lambda check: _ORDER.index(check.found)))


def check_fields(
    profile: Fingerprint, here: Fingerprint, unknown: Mapping[str, str]
) -> Iterator[Check]:
    """Compare every field of two fingerprints, except those that are ``unknown`` here, each with the reason."""
    differ = {one.field: one for one in compare_fingerprints(profile, here)}
    for field in Fingerprint.model_fields:
        said = field_text(getattr(profile, field))
        same = Check(field=field, found="same", profile=said, here=said)
        yield (
            replace(same, found="unknown", here=unknown[field])
            if field in unknown
            else differ.get(field, same)
        )


def field_text(value: object) -> str:
    """Return a field's value as text, at most 64 characters."""
    return "n/a" if value is None else str(value)[:64]
