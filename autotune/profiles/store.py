"""Reading and writing of profiles, and paths in them and to them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.errors import AutotuneError, UsageError
from autotune.profiles.toml_file import profile_from_tables, profile_to_toml
from autotune.profiles.values import Profile, updated
from autotune.trials.decide.plausibility import check_profile
from trainer.config.resolve import find_data, read_profile_tables
from trainer.config.train_config import DataSettings, Tag, TrainConfig, tagged
from trainer.data.manifest import MANIFEST_NAME
from trainer.errors import TrainerError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """A profile as read from a path, which finds the dataset that it names."""

    path: Path
    profile: Profile
    intact: bool
    """True if the content still has the hash that it was written with."""

    def data_dir(self, override: Path | None = None) -> Path:
        """Return the dataset: ``override``, else AUTOTUNE_DATA, else the profile's.

        Raises:
            BadConfig: Without any of them.
        """
        directory, _ = find_data(self.path, self.profile.train, override)
        return directory

    def data_here(self, override: Path | None = None) -> Path | None:
        """Return the dataset's directory if it holds a dataset; None otherwise."""
        try:
            directory = self.data_dir(override)
        except TrainerError:
            return None
        return directory if (directory / MANIFEST_NAME).is_file() else None


def read_profile(path: Path, tables: dict[str, Any] | None = None) -> StoredProfile:
    """Read and validate a profile.

    Args:
        path: Path of the profile.
        tables: Content of its file, if that was read before.

    Raises:
        BadInput: If it is invalid.
        Undecided: If it holds a rate that its GPU cannot reach.
        MachineLacks: If it holds a rate of a pretended GPU.
    """
    if tables is None:
        tables = read_profile_tables(path)
    profile, intact = profile_from_tables(tables, where=str(path))
    check_profile(profile)
    return StoredProfile(path=path, profile=profile, intact=intact)


def profile_paths(
    out: Path | None, names: Sequence[str], device_name: str
) -> list[Path]:
    """Return where to write the profiles of models.

    Args:
        out: Directory, or a .toml file for a single model; None means ``profiles``.
        names: Names of the models.
        device_name: Name of the device, which ends the file names.

    Raises:
        UsageError: If ``out`` or the names do not allow it.
    """
    if len(set(names)) < len(names):
        raise UsageError(
            "two models have the same name",
            next_step="Run them one at a time, each with its own --out.",
        )
    if out is not None and len(names) == 1 and out.suffix == ".toml":
        return [out]
    if out is not None and (out.suffix == ".toml" or out.is_file()):
        reason = "is not a .toml file"
        if len(names) > 1:
            reason = f"names one file for {len(names)} models"
        raise UsageError(
            f"--out {out} {reason}",
            next_step="Pass a directory, or a .toml file for a single model.",
        )
    directory = out or Path("profiles")
    return [directory / f"{name}-{device_name}.toml" for name in names]


def rebase_data_path(profile: Profile, old: Path, new: Path) -> Profile:
    """Return the profile with its dataset's path relative to another path of it.

    Args:
        profile: Profile to change.
        old: Path of the profile that its dataset's path is relative to.
        new: Path that it will be written to.
    """
    data_path = profile.train.data.path
    if data_path is None or old.parent.resolve() == new.parent.resolve():
        return profile
    new_data_path = relative_data_path(old.parent / data_path, new)
    train = with_data(profile.train, {"path": new_data_path})
    return profile.model_copy(update={"train": train})


def keep_workers(profile: Profile, path: Path) -> Profile:
    """Return the profile with the DataLoader workers of the profile at ``path``.

    They are kept only if they were measured on this machine with exactly the settings
    of the new profile, so that a repeated probe does not lose a worker sweep.
    """
    old = _readable_profile(path)
    if old is None or old.evidence.workers is None:
        return profile
    settings = {
        name: getattr(old.train.data, name) for name in tagged(DataSettings, Tag.LOADER)
    }
    train = with_data(profile.train, settings)
    # Workers that suffice for one step may not for a faster one.
    if old.fingerprint != profile.fingerprint or train != old.train:
        return profile
    return updated(profile, train, "workers", {"workers": old.evidence.workers})


def write_profile(path: Path, profile: Profile) -> Path | None:
    """Write a profile, and keep a different one at that path as ``.previous.toml``.

    Returns:
        Path of the kept profile; None if none was kept.

    Raises:
        Undecided: If the profile holds a rate that its GPU cannot reach.
        MachineLacks: If it holds a rate of a pretended GPU.
    """
    check_profile(profile)
    kept = None
    if path.is_file() and not _has_content(path, profile):
        kept = path.with_suffix(".previous.toml")
        write_atomically(kept, path.read_text(encoding="utf-8", errors="replace"))
    write_atomically(path, profile_to_toml(profile))
    return kept


def _has_content(path: Path, profile: Profile) -> bool:
    """Return whether a file has the content of a profile, whatever its provenance."""
    old = _readable_profile(path)
    if old is None:
        return False
    # The provenance has the time of writing, which always differs.
    return old.model_copy(update={"provenance": profile.provenance}) == profile


def _readable_profile(path: Path) -> Profile | None:
    """Return the profile at a path; None if there is none that can be read."""
    try:
        return read_profile(path).profile
    except (TrainerError, AutotuneError):
        return None


def relative_data_path(data_dir: Path, profile_path: Path) -> str:
    """Return a dataset's path relative to the profile, as profiles name it."""
    return os.path.relpath(data_dir.resolve(), profile_path.parent.resolve())


def with_data(config: TrainConfig, settings: Mapping[str, object]) -> TrainConfig:
    """Return the configuration with some ``data`` settings replaced."""
    return config.model_copy(update={"data": config.data.model_copy(update=settings)})
