"""The file of a profile: its tables, the hash that identifies it, and its dataset."""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import BadConfig
from trainer.formats.nested_tables import reject_infinite
from trainer.formats.tables import read_toml
from trainer.formats.train_config import PROFILE_SCHEMA_VERSION, TrainConfig

PROFILE_HASH_KEY = "content_sha256"
"""Key of a profile that holds the hash of everything else in it."""
_NAME_OR_WRITE_PROFILE = (
    "Name an existing profile, or write one: autotune tune --model MODEL --data DIR"
)
"""Next step if a file is missing or is not a profile."""
COMMAND_LINE = "command line"
ENVIRONMENT = "environment"
PROFILE = "profile"


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
        return data, COMMAND_LINE
    if environment.get("AUTOTUNE_DATA"):
        return Path(environment["AUTOTUNE_DATA"]), ENVIRONMENT
    if config.data.path is not None:
        return profile.parent / config.data.path, PROFILE
    raise BadConfig(
        "no dataset given", next_step="Pass --data DIR, or set AUTOTUNE_DATA."
    )
