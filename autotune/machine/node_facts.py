"""Facts about a node that training needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about a node."""

    name: str
    allotted_cpus: int
    gpu_names: tuple[str, ...]
    gpu_total_bytes: tuple[int, ...]
    """Total memory of each GPU, in the order of ``gpu_names``."""
    nvlinked: bool | None
    """True if NVLink connects every pair of GPUs; None with fewer than two GPUs, or if
    it is unknown."""
    code_sha256: str
    """Hash of the trainer's sources."""
    dataset_hash: str | None
    """Hash of the dataset; None if there is none."""
    dataset_dir: str
    dataset_missing: str | None = None
    """Reason why there is no dataset."""
