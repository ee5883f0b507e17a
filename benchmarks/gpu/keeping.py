"""Copy a check to ``reports/gpu/GPU/DATE``, which is committed."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.base.readable_json import readable_json
from benchmarks.gpu.results import CHECK_NAME
from benchmarks.gpu.stage import PROFILES


def keep(folder: Path, check: Mapping[str, Any], kept: Path) -> Path:
    """Copy answers, figures and profiles to ``kept/GPU/DATE``.

    The check in that directory is replaced if it is the same one, begun at the same
    time; of another one on the same day, the directory is named by its time as well.

    Returns:
        The directory.
    """
    started_utc = str(check["started_utc"])
    directory: Path = kept / check["name"] / started_utc[:10]
    if not _is_of(directory, started_utc):
        directory = directory.with_name(started_utc[:16].replace(":", ""))
    shutil.rmtree(directory / PROFILES, ignore_errors=True)
    if (folder / PROFILES).is_dir():
        shutil.copytree(folder / PROFILES, directory / PROFILES)
    write_atomically(directory / CHECK_NAME, readable_json(check))
    return directory


def _is_of(directory: Path, started_utc: str) -> bool:
    """Return whether a directory is free, or has the check that began at this time."""
    path = directory / CHECK_NAME
    return not path.exists() or f'"{started_utc}"' in path.read_text()


def ship_capped_profiles(folder: Path, capped_gpu: str, profiles: Path) -> None:
    """Copy profiles that were measured under the cap of a smaller GPU.

    Their memory is that of the smaller GPU, their speed that of the GPU they ran on.

    Args:
        folder: Directory of the check.
        capped_gpu: Name of the smaller GPU.
        profiles: Directory of the profiles that come with the repository.
    """
    for path in sorted((folder / PROFILES).glob(f"*-{capped_gpu}.toml")):
        shutil.copyfile(path, profiles / path.name)
