"""Configuration of a run, from a profile, the command line and the environment.

No torch here.

Precedence: command line (``--set``, ``--data``) > environment (``AUTOTUNE_DATA``) >
profile > default. The run prints and records the source of each value.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.assignments import assign_all
from trainer.config.train_config import (
    PROFILE_SCHEMA_VERSION,
    TrainConfig,
    flatten_settings,
)
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import BadConfig, ProfileMismatch
from trainer.formats.nested_tables import reject_infinite
from trainer.formats.tables import parse_table, read_toml

PROFILE_HASH_KEY = "content_sha256"
"""Key of a profile that holds the hash of everything else in it."""
_NAME_OR_WRITE_PROFILE = (
    "Name an existing profile, or write one: autotune tune --model MODEL --data DIR"
)
"""Next step if a file is missing or is not a profile."""
_COMMAND_LINE = "command line"
_ENVIRONMENT = "environment"
_PROFILE = "profile"
_DEFAULT = "default"


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


def read_profile_tables(path: Path, table: str = "train") -> dict[str, Any]:
    """Read a profile and return its tables.

    Args:
        path: Path of the profile.
        table: Table that it must have: ``train``, or ``subject`` for a profile that
            may be of your own training code.

    Raises:
        BadConfig: If the file is no such profile, has another schema version, or has a
            number that is not finite.
    """
    tables = read_toml(path, if_missing=_NAME_OR_WRITE_PROFILE)
    version = tables.get("schema_version")
    if version != PROFILE_SCHEMA_VERSION:
        raise BadConfig(
            f"{path} has schema version {version!r}; this program reads version"
            f" {PROFILE_SCHEMA_VERSION}",
            next_step=_next_step_of_other_version(path, tables),
        )
    reject_infinite(tables, str(path))
    if isinstance(tables.get(table), dict):
        return tables
    if isinstance(tables.get("subject"), dict):
        raise BadConfig(
            f"{path} is a profile of your own training code, not one of this project's"
            " trainer",
            next_step=f"Use its values in your code: autotune profile show {path}",
        )
    raise BadConfig(
        f"{path} is not a profile: it has no [{table}] table",
        next_step=_NAME_OR_WRITE_PROFILE,
    )


def _next_step_of_other_version(path: Path, tables: Mapping[str, Any]) -> str:
    """Return the command that writes a profile of this version for the same subject."""
    train, subject = tables.get("train"), tables.get("subject")
    if isinstance(train, dict):
        # A profile of any version names its model.
        tune = shlex.join(["autotune", "tune", "--model", str(path)])
        return f"Measure again: {tune} --data DIR"
    if isinstance(subject, dict):
        # Version 2 has the names of functions in [subject].
        step = subject.get("step")
        function = step if isinstance(step, str) else "MODULE:build_step"
        probe = ["autotune", "probe", "--step", function, "--out", str(path)]
        return f"Measure again: {shlex.join(probe)}"
    return _NAME_OR_WRITE_PROFILE


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
    sources |= dict.fromkeys(profile_keys, _PROFILE)
    sources |= dict.fromkeys(assigned_keys, _COMMAND_LINE)
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


def profile_sha256(tables: dict[str, Any]) -> str:
    """Return the hash by which run records identify a profile.

    It covers the keys and values of all tables, but not comments and order.
    """
    # TOML dates become text, so that a profile has a canonical JSON form.
    return canonical_sha256(json.loads(json.dumps(tables, default=str)))


def is_modified(tables: dict[str, Any]) -> bool:
    """Return whether a profile was edited after tuning wrote it and its hash.

    A profile without a hash was written by hand, and is not modified.
    """
    written_sha256 = tables.get(PROFILE_HASH_KEY)
    if written_sha256 is None:
        return False
    content = {key: value for key, value in tables.items() if key != PROFILE_HASH_KEY}
    try:
        return bool(written_sha256 != canonical_sha256(content))
    except (TypeError, ValueError):
        return True  # no JSON, such as a date, which tuning never writes


def modified_text(profile: Path) -> str:
    """Return the warning that a profile was modified, as a line for the console."""
    return (
        f"warning: {profile} was modified after it was tuned (its {PROFILE_HASH_KEY}"
        " does not match): what was measured may not hold for its settings\n"
    )


def find_data(
    profile: Path,
    config: TrainConfig,
    data: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Path, str]:
    """Find the dataset's directory.

    Args:
        profile: Path of the profile, which its dataset is relative to.
        config: Configuration, which may name a dataset.
        data: Directory from the command line, which comes first; None if there is none.
        environment: Environment variables, of which AUTOTUNE_DATA comes second.

    Returns:
        The directory, and the source that names it, as in ``ResolvedConfig.sources``.

    Raises:
        BadConfig: If none of them names a dataset.
    """
    if data is not None:
        return data, _COMMAND_LINE
    if environment.get("AUTOTUNE_DATA"):
        return Path(environment["AUTOTUNE_DATA"]), _ENVIRONMENT
    if config.data.path is not None:
        return profile.parent / config.data.path, _PROFILE
    raise BadConfig(
        "no dataset given", next_step="Pass --data DIR, or set AUTOTUNE_DATA."
    )
