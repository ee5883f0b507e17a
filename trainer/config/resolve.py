"""The configuration of a run, from a profile, the command line and the environment. No torch here.

Precedence: command line (``--set``, ``--data``) > environment (``AUTOTUNE_DATA``) > profile > default. Every value
keeps the name of the place it came from, and the run prints and records it.
"""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.tables import canonical_sha256, parse_table, read_toml, refuse_infinite
from trainer.config.train_config import PROFILE_SCHEMA_VERSION, TrainConfig, dotted
from trainer.errors import BadConfig, ProfileMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A validated configuration with the origin of each value."""

    config: TrainConfig
    sources: Mapping[str, str]
    """Dotted key to ``command line``, ``environment``, ``profile`` or ``default``."""
    data_dir: Path
    profile_sha256: str
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """The profile's, of the machine that it was tuned on; empty where it has none."""

    @property
    def config_sha256(self) -> str:
        """Names the configuration, whatever it came from."""
        return canonical_sha256(self.config.model_dump(mode="json"))


def read_profile_tables(path: Path) -> dict[str, Any]:
    """Read a profile's tables; raise ``BadConfig`` without a ``[train]`` table, or for another schema version."""
    tables = read_toml(path, if_missing="Write one with: autotune tune --model MODEL --data DIR")
    version = tables.get("schema_version")
    if version != PROFILE_SCHEMA_VERSION:
        raise BadConfig(
            f"{path} has schema version {version!r}; this program reads version {PROFILE_SCHEMA_VERSION}",
            next_step="Probe again with this version: autotune probe --model MODEL --data DIR",
        )
    refuse_infinite(tables, str(path))
    if not isinstance(tables.get("train"), dict):
        raise BadConfig(f"{path} has no [train] table", next_step="Write profiles with: autotune probe")
    return tables


def resolve(
    profile: Path,
    *,
    assignments: Sequence[str] = (),
    data: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    expect_sha256: str | None = None,
) -> ResolvedConfig:
    """Combine a profile with the command line and the environment.

    ``assignments`` are ``train.key=value`` texts, with TOML values or bare words for strings; ``expect_sha256`` is what
    ``profile_sha256`` has to give for the file as it is now.

    Raises:
        BadConfig: If any of it cannot be used.
        ProfileMismatch: If the file says something else than is expected.
    """
    tables = read_profile_tables(profile)
    said = profile_sha256(tables)  # what the file says, before anything else has its say
    if expect_sha256 not in (None, said):
        raise ProfileMismatch(
            f"{profile} is not what was to be trained from: its SHA-256 begins {said[:12]}, not {expect_sha256[:12]}",
            next_step="Undo the change; or have the profile reviewed as it is now, and launch it again.",
        )
    train: dict[str, Any] = tables["train"]
    sources = dict.fromkeys(dotted(train, "train."), "profile")
    for assignment in assignments:
        sources[_assign(train, assignment)] = "command line"
    config = parse_table(TrainConfig, train, where=f"{profile} [train]")
    data_dir, source = find_data(profile, config, data, environment)
    sources["train.data.path"] = source
    for name in dotted(config.model_dump(mode="json"), "train."):
        sources.setdefault(name, "default")
    found = tables.get("fingerprint")
    fingerprint = found if isinstance(found, dict) else {}
    return ResolvedConfig(
        config=config, sources=sources, data_dir=data_dir, profile_sha256=said, fingerprint=fingerprint
    )


def profile_sha256(tables: dict[str, Any]) -> str:
    """The hash by which a run's record names the profile it was started from: of all its tables, not its comments."""
    # TOML dates become text, so that a profile has a canonical JSON form.
    return canonical_sha256(json.loads(json.dumps(tables, default=str)))


def find_data(
    profile: Path, config: TrainConfig, data: Path | None, environment: Mapping[str, str] = os.environ
) -> tuple[Path, str]:
    """Return the dataset's directory, and where it was named: ``data``, else AUTOTUNE_DATA, else the profile."""
    if data is not None:
        return data, "command line"
    if environment.get("AUTOTUNE_DATA"):
        return Path(environment["AUTOTUNE_DATA"]), "environment"
    if config.data.path is not None:
        return profile.parent / config.data.path, "profile"
    raise BadConfig("no dataset was named", next_step="Give --data DIR, or set AUTOTUNE_DATA.")


def _assign(train: dict[str, Any], text: str) -> str:
    """Put what ``train.key=value`` says into the table, and return the dotted key."""
    name, equals, raw = text.partition("=")
    dotted_key = name.strip()
    *tables, key = dotted_key.split(".")
    if not equals or tables[:1] != ["train"]:
        raise BadConfig(f"--set {text!r} is not of the form train.key=value", next_step="Try --set train.max_steps=30")
    try:
        value: object = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    table = train
    for part in tables[1:]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise BadConfig(f"{part!r} in --set {dotted_key} is not a table", next_step="Check the key.")
    # TOML tells 1 from 1.0, people at a prompt do not, and transformers does.
    if isinstance(value, int) and not isinstance(value, bool) and isinstance(table.get(key), float):
        value = float(value)
    table[key] = value
    return dotted_key
