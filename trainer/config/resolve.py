"""Configuration of a run, from a profile, the command line and the environment.

No torch here.

Precedence: command line (``--set``, ``--data``) > environment (``AUTOTUNE_DATA``) >
profile > default. The run prints and records the source of each value.
"""

import importlib.util
import json
import os
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config.tables import (
    canonical_sha256,
    parse_table,
    read_toml,
    reject_infinite,
)
from trainer.config.train_config import PROFILE_SCHEMA_VERSION, TrainConfig, dotted
from trainer.errors import BadConfig, ProfileMismatch

_WRITE_ONE = (
    "Name an existing profile, or write one: autotune tune --model MODEL --data DIR"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Validated configuration with the source of each value."""

    config: TrainConfig
    sources: Mapping[str, str]
    """Source of each dotted key: ``command line``, ``environment``, ``profile`` or
    ``default``."""
    data_dir: Path
    profile_sha256: str
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprint of the machine that the profile was tuned on; empty if it has
    none."""

    @property
    def config_sha256(self) -> str:
        """SHA-256 of the configuration, independent of the sources of its values."""
        return canonical_sha256(self.config.model_dump(mode="json"))


def read_profile_tables(path: Path, table: str = "train") -> dict[str, Any]:
    """Read a profile with a ``table``, ``subject`` for your own training code.

    Raises:
        BadConfig: If it is invalid.
    """
    tables = read_toml(path, if_missing=_WRITE_ONE)
    if (version := tables.get("schema_version")) != PROFILE_SCHEMA_VERSION:
        what = (
            f"{path} has schema version {version!r}; this program reads version"
            f" {PROFILE_SCHEMA_VERSION}"
        )
        raise BadConfig(what, next_step=_WRITE_ONE)
    reject_infinite(tables, str(path))
    if not isinstance(tables.get(table), dict):
        if "subject" in tables:
            what = (
                f"{path} is a profile of your own training code, not one of this"
                " project's trainer"
            )
            raise BadConfig(
                what,
                next_step=f"Use its values in your code: autotune profile show {path}",
            )
        raise BadConfig(
            f"{path} is not a profile: it has no [{table}] table", next_step=_WRITE_ONE
        )
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

    ``assignments`` are ``train.key=value`` texts, with TOML values or bare words for
    strings; ``expect_sha256`` is the ``profile_sha256`` that the file must have. Raise
    ``BadConfig`` if the file, a value or an assignment is invalid, or no dataset is
    named, ``ProfileMismatch`` if the file's hash is not ``expect_sha256``.
    """
    tables = read_profile_tables(profile)
    said = profile_sha256(tables)  # before assignments change the tables
    if expect_sha256 not in (None, said):
        what = (
            f"{profile} was modified: its SHA-256 is {said[:12]}…, expected"
            f" {expect_sha256[:12]}…"
        )
        next_step = (
            "Undo the change; or review it, and start again after: autotune profile"
            f" approve {profile}"
        )
        raise ProfileMismatch(what, next_step=next_step, docs="profile-modified")
    train: dict[str, Any] = tables["train"]
    sources = dict.fromkeys(dotted(train, "train."), "profile")
    for assignment in assignments:
        sources[_assign(train, assignment)] = "command line"
    config = parse_table(TrainConfig, train, where=f"{profile} [train]")
    data_dir, sources["train.data.path"] = find_data(profile, config, data, environment)
    sources = (
        dict.fromkeys(dotted(config.model_dump(mode="json"), "train."), "default")
        | sources
    )
    found = tables.get("fingerprint")
    return ResolvedConfig(
        config=config,
        sources=sources,
        data_dir=data_dir,
        profile_sha256=said,
        fingerprint=found if isinstance(found, dict) else {},
    )


def missing_for_compile(device: str) -> str | None:
    """Return what ``torch.compile`` lacks on this machine, as text; None if nothing."""
    compilers = ("g++", "c++", "clang++") if device == "cpu" else ("gcc", "cc", "clang")
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # Triton and Inductor compile the launchers of kernels.
    found = os.environ.get("CXX" if device == "cpu" else "CC") or next(
        filter(shutil.which, compilers), None
    )
    return None if found else f"no compiler found ({', '.join(compilers)})"


def with_compile(resolved: ResolvedConfig) -> tuple[ResolvedConfig, str | None]:
    """Decide whether a GPU's layers are compiled where you set nothing, with the reason if they are not."""
    config = resolved.config
    if config.compile is not None or config.device != "cuda":
        return resolved, None
    missing = missing_for_compile("cuda")
    config = config.model_copy(update={"compile": missing is None})
    return (
        replace(resolved, config=config),
        missing and f"layers are not compiled, and slower: {missing}",
    )


def profile_sha256(tables: dict[str, Any]) -> str:
    """Return the hash of a profile's tables, without comments, by which a run record identifies its profile."""
    # TOML dates become text, so that a profile has a canonical JSON form.
    return canonical_sha256(json.loads(json.dumps(tables, default=str)))


def find_data(
    profile: Path,
    config: TrainConfig,
    data: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Path, str]:
    """Return the dataset's directory and source: ``data``, else AUTOTUNE_DATA, else the profile; else ``BadConfig``."""
    if data is not None:
        return data, "command line"
    if environment.get("AUTOTUNE_DATA"):
        return Path(environment["AUTOTUNE_DATA"]), "environment"
    if config.data.path is not None:
        return profile.parent / config.data.path, "profile"
    raise BadConfig(
        "no dataset given", next_step="Pass --data DIR, or set AUTOTUNE_DATA."
    )


def _assign(train: dict[str, Any], text: str) -> str:
    """Set a ``train.key=value`` assignment in the table and return its dotted key."""
    name, equals, raw = text.partition("=")
    dotted_key = name.strip()
    *tables, key = dotted_key.split(".")
    if not equals or tables[:1] != ["train"]:
        raise BadConfig(
            f"--set {text!r} does not match train.KEY=VALUE",
            next_step="Example: --set train.max_steps=30",
        )
    try:
        value: object = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    table = train
    for part in tables[1:]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise BadConfig(
                f"--set {dotted_key}: {part!r} is not a table",
                next_step="Check the key.",
            )
    # TOML and transformers distinguish 1 from 1.0; users at a prompt do not.
    table[key] = (
        float(value)
        if type(value) is int and isinstance(table.get(key), float)
        else value
    )
    return dotted_key
