"""What figures of the GPU check depend on beside the device, so that those of different versions are told apart."""

import hashlib
from pathlib import Path

from autotune.search.site import Site
from trainer.dataset import Manifest

ROOT = Path(__file__).parents[3]
PACKAGES = ("autotune", "trainer")
"""Whose sources count; the check's own may change between two visits to a scarce GPU."""


def made_with(site: Site, manifest: Manifest) -> dict[str, str | None]:
    """By name: a hash of this project's sources, versions of libraries and of the driver, and the dataset's hash."""
    return {
        "code": code_sha256(ROOT)[:16],
        "torch": site.versions.get("torch"),
        "transformers": site.versions.get("transformers"),
        "driver": site.gpu.driver if site.gpu else None,
        "dataset": manifest.dataset_hash,
    }


def code_sha256(root: Path) -> str:
    """Over the sources of the packages below a directory."""
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
