"""Facts about a node that training needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about a node."""

    name: str
    allotted_cpus: int
    gpu_names: tuple[str, ...]
    gpu_total_bytes: tuple[int, ...]
    nvlinked: bool | None
    """True if NVLink connects every pair of GPUs; None with fewer than two GPUs, or if
    it is unknown."""
    code_sha256: str
    dataset_hash: str | None
    dataset_dir: str
    dataset_missing: str | None = None
