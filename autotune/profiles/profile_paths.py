"""Paths to write profiles to, and paths of the datasets that profiles name."""

import os
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import UsageError
from autotune.evidence.profile import Profile
from autotune.profiles.store import with_data


def profile_paths(
    out: Path | None, names: Sequence[str], device_name: str
) -> list[Path]:
    """Return the path to write each profile to.

    Args:
        out: Directory, or a .toml file for a single profile; None means ``profiles``.
        names: Names of the models, or of your functions with their arguments.
        device_name: Name of the device, which ends the file names.

    Raises:
        UsageError: If two profiles have the same name, or ``out`` is a file that cannot
            hold the profiles.
    """
    if len(set(names)) < len(names):
        raise UsageError(
            "two profiles have the same name",
            next_step="Run them one at a time, each with its own --out.",
        )
    if out is not None and len(names) == 1 and out.suffix == ".toml":
        return [out]
    if out is not None and (out.suffix == ".toml" or out.is_file()):
        reason = "is not a .toml file"
        if len(names) > 1:
            reason = f"names one file for {len(names)} profiles"
        raise UsageError(
            f"--out {out} {reason}",
            next_step="Pass a directory, or a .toml file for a single profile.",
        )
    directory = out or Path("profiles")
    return [directory / f"{name}-{device_name}.toml" for name in names]


def rebase_data_path(profile: Profile, old: Path, new: Path) -> Profile:
    """Return the profile for another path, from which its dataset is found as well.

    A profile names its dataset relative to its own directory. Code of yours has its own
    data, so that nothing changes.

    Args:
        profile: Profile to move.
        old: Path that the profile was read from.
        new: Path that the profile will be written to.
    """
    if not profile.has_train:
        return profile
    data_path = profile.train.data.path
    if data_path is None or old.parent.resolve() == new.parent.resolve():
        return profile
    new_data_path = relative_data_path(old.parent / data_path, new)
    return profile.with_train(with_data(profile.train, {"path": new_data_path}))


def relative_data_path(data_dir: Path, profile_path: Path) -> str:
    """Return a dataset's path relative to the directory of the profile."""
    return os.path.relpath(data_dir.resolve(), profile_path.parent.resolve())
