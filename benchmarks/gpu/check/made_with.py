"""What figures of the GPU check depend on beside the device, so that those of different versions are told apart."""

from pathlib import Path

from autotune.search.site import Site
from trainer.dataset import Manifest
from trainer.record import code_sha256

ROOT = Path(__file__).parents[3]
PACKAGES = ("autotune", "trainer")
"""Whose sources count; the check's own may change between two visits to a scarce GPU."""
HASH_CHARACTERS = 8


def made_with(site: Site, manifest: Manifest) -> dict[str, str | None]:
    """By name: hashes of this project's sources, versions of libraries and of the driver, and the dataset's hash."""
    return {name: code_sha256(ROOT / name)[:HASH_CHARACTERS] for name in PACKAGES} | {
        "torch": site.versions.get("torch"),
        "transformers": site.versions.get("transformers"),
        "driver": site.gpu.driver if site.gpu else None,
        "dataset": manifest.dataset_hash,
    }
