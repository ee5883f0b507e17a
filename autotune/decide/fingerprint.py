"""Hold a profile's fingerprint against another machine, model or dataset, field by field."""

from dataclasses import dataclass, replace
from typing import Literal

from autotune.core.profile import Fingerprint

Severity = Literal["refuse", "warn", "inform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One field that differs."""

    field: str
    severity: Severity
    profile: str
    here: str


# What each difference does to the profile's figures.
_SEVERITY: dict[str, Severity] = {
    "device": "refuse",
    "gpu_name": "refuse",
    "gpu_mig": "refuse",
    "model_sha256": "refuse",
    "dataset_hash": "refuse",
    "cpu_model": "warn",
    "allotted_cpus": "warn",
    "gpu_count": "warn",
    "gpu_power_cap_w": "warn",
    "driver": "warn",
    "cuda": "warn",
    "torch": "warn",
    "transformers": "warn",
    "data_filesystem": "warn",
    "python": "inform",
    "ram_total_bytes": "inform",
}


_ORDER: tuple[Severity, ...] = ("refuse", "warn", "inform")
_OF_THE_GPU = ("device", "gpu_name", "gpu_count", "gpu_total_bytes", "gpu_mig", "gpu_power_cap_w", "driver", "cuda")


def compare(profile: Fingerprint, here: Fingerprint) -> tuple[Mismatch, ...]:
    """Every field that differs, worst first. More GPU memory than the profile's is no obstacle, less is."""
    found: list[Mismatch] = []
    for field in Fingerprint.model_fields:
        old, new = getattr(profile, field), getattr(here, field)
        if old == new:
            continue
        severity: Severity = _SEVERITY.get(field, "inform")
        if field == "gpu_total_bytes":
            severity = "refuse" if (new or 0) < (old or 0) else "inform"
        found.append(Mismatch(field=field, severity=severity, profile=_shown(old), here=_shown(new)))
    return tuple(sorted(found, key=lambda mismatch: _ORDER.index(mismatch.severity)))


def compare_for_replay(profile: Fingerprint, here: Fingerprint) -> tuple[Mismatch, ...]:
    """The same where a GPU's step is replayed: the GPU does not matter, the CPU and the disk must be the same kind."""
    severities: dict[str, Severity] = {"cpu_model": "refuse", "data_filesystem": "refuse"}
    found = [
        replace(one, severity=severities.get(one.field, one.severity))
        for one in compare(profile, here)
        if one.field not in _OF_THE_GPU
    ]
    return tuple(sorted(found, key=lambda mismatch: _ORDER.index(mismatch.severity)))


def _shown(value: object) -> str:
    return "n/a" if value is None else str(value)[:40]
