"""Configuration of a run, from a profile, the command line and the environment.

No torch here.

Precedence: command line (``--set``, ``--data``) > environment (``AUTOTUNE_DATA``) >
profile > default. The run prints and records the source of each value.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.assignments import assign_all
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import ProfileMismatch
from trainer.formats.profile_file import (
    COMMAND_LINE,
    PROFILE,
    PROFILE_HASH_KEY,
    find_data,
    is_modified,
    profile_sha256,
    read_profile_tables,
)
from trainer.formats.tables import parse_table
from trainer.formats.train_config import TrainConfig, flatten_settings

_DEFAULT = "default"
"""Source of a value that nothing sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Validated configuration with the source of each value."""

    config: TrainConfig
    sources: Mapping[str, str]
    """Source of each dotted key: ``command line``, ``environment``, ``profile`` or
    ``default``."""
    data_dir: Path
    """Directory of the dataset to train on."""
    profile_sha256: str
    """Hash by which run records identify the profile, as SHA-256 of its tables."""
    profile_modified: bool = False
    """True if the profile was edited after it was tuned."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the machine that the profile was tuned on, by their names; empty if the
    profile has none."""

    @property
    def config_sha256(self) -> str:
        """SHA-256 of the configuration, independent of the sources of its values."""
        return canonical_sha256(self.config.model_dump(mode="json"))


def resolve(
    profile: Path,
    *,
    assignments: Sequence[str] = (),
    data: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    expect_sha256: str | None = None,
) -> ResolvedConfig:
    """Combine a profile with the command line and the environment.

    Args:
        profile: Path of the profile.
        assignments: ``train.key=value`` texts, with TOML values, or bare words for
            strings.
        data: Dataset directory from the command line.
        environment: Environment variables.
        expect_sha256: ``profile_sha256`` that the file must have; None accepts any.

    Raises:
        BadConfig: If the file, a value or an assignment is invalid, or no dataset is
            named.
        ProfileMismatch: If the file's hash is not ``expect_sha256``.
    """
    tables = read_profile_tables(profile)
    # Hash the tables before assignments change them.
    sha256 = profile_sha256(tables)
    profile_modified = is_modified(tables)
    if expect_sha256 is not None:
        _check_profile_sha256(profile, sha256, expect_sha256)
    train: dict[str, Any] = tables["train"]
    profile_keys = flatten_settings(train, "train.")
    assigned_keys = assign_all(profile, train, assignments)
    config = parse_table(TrainConfig, train, where=f"{profile} [train]")
    data_dir, data_source = find_data(profile, config, data, environment)
    all_keys = flatten_settings(config.model_dump(mode="json"), "train.")
    # Later sources take precedence.
    sources = dict.fromkeys(all_keys, _DEFAULT)
    sources |= dict.fromkeys(profile_keys, PROFILE)
    sources |= dict.fromkeys(assigned_keys, COMMAND_LINE)
    sources["train.data.path"] = data_source
    fingerprint = tables.get("fingerprint")
    return ResolvedConfig(
        config=config,
        sources=sources,
        data_dir=data_dir,
        profile_sha256=sha256,
        profile_modified=profile_modified,
        fingerprint=fingerprint if isinstance(fingerprint, dict) else {},
    )


def _check_profile_sha256(profile: Path, sha256: str, expected_sha256: str) -> None:
    """Raise ``ProfileMismatch`` if a profile does not have the expected hash."""
    if sha256 == expected_sha256:
        return
    raise ProfileMismatch(
        f"{profile} was modified: its SHA-256 is {sha256[:12]}…, expected"
        f" {expected_sha256[:12]}…",
        next_step=(
            "Undo the change; or review it, and start again after: autotune"
            f" profile approve {profile}"
        ),
        docs="profile-modified",
    )


def modified_text(profile: Path) -> str:
    """Return the warning that a profile was modified, as a line for the console."""
    return (
        f"warning: {profile} was modified after it was tuned (its {PROFILE_HASH_KEY}"
        " does not match): what was measured may not hold for its settings\n"
    )
