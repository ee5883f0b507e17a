"""Hold a profile's fingerprint against another machine, model or dataset, field by field."""

from autotune.core.profile import Fingerprint
from autotune.core.verification import Check, Found

_REFUSED = ("device", "gpu_name", "gpu_mig", "model_sha256", "dataset_hash")
"""What makes the profile's figures worthless where it differs."""
_WARNED = (
    "cpu_model", "allotted_cpus", "gpu_count", "gpu_power_cap_w", "driver", "cuda", "torch", "transformers",
    "data_filesystem",
)  # fmt: skip
_OF_THE_GPU = ("device", "gpu_name", "gpu_count", "gpu_total_bytes", "gpu_mig", "gpu_power_cap_w", "driver", "cuda")
_OF_A_REPLAY = ("cpu_model", "data_filesystem")
_ORDER: tuple[Found, ...] = ("refuse", "warn", "inform")


def compare(profile: Fingerprint, here: Fingerprint, *, replayed: bool = False) -> tuple[Check, ...]:
    """Return every field that differs, worst first. More GPU memory than the profile's is no obstacle, less is.

    If a GPU's step is replayed, the GPU does not matter, and CPU and disk must be the same kind.
    """
    found = []
    for field in Fingerprint.model_fields:
        old, new = getattr(profile, field), getattr(here, field)
        if old == new or (replayed and field in _OF_THE_GPU):
            continue
        is_less = field == "gpu_total_bytes" and (new or 0) < (old or 0)
        severity: Found = "warn" if field in _WARNED else "inform"
        if is_less or field in _REFUSED or (replayed and field in _OF_A_REPLAY):
            severity = "refuse"
        found.append(Check(field=field, found=severity, profile=shown(old), here=shown(new)))
    return tuple(sorted(found, key=lambda check: _ORDER.index(check.found)))


def shown(value: object) -> str:
    """Return a field's value in words."""
    return "n/a" if value is None else str(value)[:64]
