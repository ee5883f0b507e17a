"""Comparison of a profile with this machine, model and dataset. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.evidence.profile import Fingerprint
from autotune.profiles.checks import Check, CheckResult

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
"""Fields that do not matter if a GPU's step is replayed on a machine without it."""
_REPLAY_ERROR_FIELDS = ("cpu_model", "data_filesystem")
"""Fields that invalidate the figures of a replayed step if they differ, as the CPU and
the file system feed it."""
_MOST_CHARACTERS = 64
"""Longest value of a field in a check, in characters: those of a SHA-256."""
_SEVERITIES: tuple[CheckResult, ...] = ("error", "warning", "info")
"""Severities of a difference, the most severe first."""


def compare_fingerprints(
    profile: Fingerprint, here: Fingerprint, *, replayed: bool = False
) -> tuple[Check, ...]:
    """Return the checks of the fields that differ, the most severe first.

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


def _severity(
    field: str, recorded: Any, present: Any, *, replayed: bool
) -> CheckResult:
    """Return the severity of a field that differs.

    Less GPU memory than in the profile is an error, more is not.

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
    """Return whether there is less GPU memory than recorded; None means no GPU."""
    return (present_bytes or 0) < (recorded_bytes or 0)


def check_fields(
    profile: Fingerprint, here: Fingerprint, unknown: Mapping[str, str]
) -> Iterator[Check]:
    """Yield a check of every field, in the order of the fingerprint.

    Args:
        profile: Fingerprint of the profile.
        here: Fingerprint of this machine.
        unknown: Fields that cannot be compared, with the reasons.
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
    """Return a field's value as text, cut if it is long; ``n/a`` if it has none."""
    return "n/a" if value is None else str(value)[:_MOST_CHARACTERS]
