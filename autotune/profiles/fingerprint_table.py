"""Table of fingerprints: the machine, versions, model and dataset of profiles."""

from collections.abc import Sequence

from autotune.base.document import Table
from autotune.base.units import format_bytes
from autotune.evidence.profile import Fingerprint

_FIELD_NAMES = {
    "device": "device",
    "gpu_name": "GPU",
    "gpu_count": "GPUs",
    "gpu_total_bytes": "GPU memory",
    "gpu_mig": "MIG enabled",
    "gpu_power_cap_w": "GPU power limit, W",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "transformers": "transformers",
    "python": "Python",
    "cpu_model": "CPU",
    "allotted_cpus": "available CPU cores",
    "ram_total_bytes": "host memory",
    "data_filesystem": "file system of the data",
    "model_sha256": "model config, SHA-256",
    "dataset_hash": "dataset, hash",
}
"""Name of each field of a fingerprint in reports, in their order."""


def fingerprint_table(
    fingerprints: Sequence[Fingerprint], titles: Sequence[str]
) -> Table:
    """Return a table of fingerprints side by side, without fields that none has.

    Args:
        fingerprints: Fingerprints of the profiles.
        titles: Title of each fingerprint's column.
    """
    rows = []
    for field, name in _FIELD_NAMES.items():
        cells = [
            _field_text(field, getattr(fingerprint, field))
            for fingerprint in fingerprints
        ]
        if any(cells):
            rows.append([name, *cells])
    return Table(caption="Machine", headers=("field", *titles), rows=tuple(rows))


def _field_text(field: str, value: object) -> str | None:
    """Return the value of a field as reports show it; None if it has no value."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return str(value)
