"""Profiles as TOML, with the hash of their content.

The hash tells whether a profile was edited since it was written.
"""

from collections.abc import Sequence
from typing import Any

from autotune.errors import BadInput
from autotune.profiles.values import Profile
from trainer.config.resolve import PROFILE_HASH_KEY
from trainer.config.tables import TableT, canonical_sha256, parse_table
from trainer.errors import BadConfig

# Comments above a profile's tables.
_HEADER = (
    (
        "A tuned profile. The trainer reads [train]. If you edit it, content_sha256 no"
        " longer matches, and reports show"
    ),
    "the profile as modified. Names contain the units; a _share is between 0 and 1.",
)

# Always written, so that a reader sees what was decided; everything else only if it
# differs from its default.
_ALWAYS_WRITTEN = (
    "seq_length_tokens",
    "layout",
    "micro_batch_size",
    "global_batch_size",
    "precision",
    "device",
    "seed",
)


def profile_to_toml(profile: Profile) -> str:
    """Return the profile as TOML, with its content hash."""
    tables: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    changed = profile.train.model_dump(mode="json", exclude_defaults=True)
    # Decided, even if the decision is the default.
    if profile.evidence.workers is not None:
        changed.setdefault("data", {})["num_workers"] = profile.train.data.num_workers
    always = {name: tables["train"][name] for name in _ALWAYS_WRITTEN}
    tables["train"] = always | changed
    return tables_to_toml(tables, _HEADER)


def tables_to_toml(tables: dict[str, Any], header: Sequence[str]) -> str:
    """Return the tables of a profile as TOML, with their hash.

    Args:
        tables: Tables and plain values of the profile.
        header: Comments to write above them.
    """
    import tomlkit

    document = tomlkit.document()
    for line in header:
        document.add(tomlkit.comment(line))
    hashed = tables | {PROFILE_HASH_KEY: canonical_sha256(tables)}
    # Plain values come first: below a table, they would belong to it in TOML.
    for name, value in hashed.items():
        if not isinstance(value, dict):
            document.add(name, value)
    for name, value in hashed.items():
        if isinstance(value, dict):
            document.add(name, value)
    return tomlkit.dumps(document)


def profile_from_tables(tables: dict[str, Any], *, where: str) -> tuple[Profile, bool]:
    """Return a file's profile, and whether its content has the recorded hash.

    Raises:
        BadInput: If it is invalid.
    """
    profile = parse_profile(Profile, tables, where=where)
    is_intact = tables.get(PROFILE_HASH_KEY) == present_sha256(tables, where=where)
    return profile, is_intact


def parse_profile(
    profile_type: type[TableT], tables: dict[str, Any], *, where: str
) -> TableT:
    """Return a file's profile, which may be one of your own training code.

    Args:
        profile_type: Class of the profile.
        tables: Content of the file, with the hash.
        where: Name of the file in errors.

    Raises:
        BadInput: If it is invalid.
    """
    try:
        return parse_table(profile_type, _hashed_tables(tables), where=where)
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error


def present_sha256(tables: dict[str, Any], *, where: str) -> str:
    """Return a profile's present hash, whatever it records.

    Raises:
        BadInput: If a value has no canonical form.
    """
    try:
        return canonical_sha256(_hashed_tables(tables))
    except (TypeError, ValueError) as error:
        # A date, or a number that is not finite.
        raise BadInput(
            f"{where} contains an unsupported value: {error}",
            next_step="Use numbers, strings, lists and tables only.",
        ) from error


def _hashed_tables(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the content that the hash covers: all but the hash itself."""
    return {key: value for key, value in tables.items() if key != PROFILE_HASH_KEY}
