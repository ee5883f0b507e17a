"""Profiles as TOML, with the hash of their content.

The hash tells whether a profile was edited since it was written.
"""

from typing import Any

from autotune.errors import BadInput
from autotune.evidence.profile import Profile
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import BadConfig
from trainer.formats.profile_file import PROFILE_HASH_KEY
from trainer.formats.tables import parse_table

_TRAINER_READS = "The trainer reads [train]."
_USE_SETTINGS = "Use the values of [settings] in your code."
_HEADER_LINES = (
    (
        "A tuned profile. {} If you edit it, content_sha256 no longer matches, and"
        " reports show"
    ),
    "the profile as modified. Names contain the units; a _share is between 0 and 1.",
)
"""Two lines of comments above the tables of a profile; the first one says how to use
it."""
_ALWAYS_WRITTEN = (
    "seq_length_tokens",
    "layout",
    "micro_batch_size",
    "global_batch_size",
    "precision",
    "device",
    "seed",
)
"""Settings of ``[train]`` that are written even at their defaults, so that a reader
sees that they were decided."""


def profile_to_toml(profile: Profile) -> str:
    """Return the profile as TOML, with its content hash.

    Of the bundled trainer's settings, only those in ``_ALWAYS_WRITTEN``, those that
    differ from their defaults, and the workers of a worker sweep are written.
    """
    tables: dict[str, Any] = profile.model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    usage = _USE_SETTINGS
    if profile.has_train:
        usage = _TRAINER_READS
        # The trainer has no settings of your code.
        del tables["settings"]
        train = {name: tables["train"][name] for name in _ALWAYS_WRITTEN}
        train |= profile.train.model_dump(mode="json", exclude_defaults=True)
        # A sweep decides the number of workers, even if it decides for the default.
        if profile.evidence.workers is not None:
            train.setdefault("data", {})["num_workers"] = profile.train.data.num_workers
        tables["train"] = train
    # Empty tables of the subject say nothing.
    tables["subject"] = {
        name: value for name, value in tables["subject"].items() if value != {}
    }
    return _tables_to_toml(tables, usage)


def _tables_to_toml(tables: dict[str, Any], usage: str) -> str:
    """Return the tables of a profile as TOML, with the hash of their content.

    Args:
        tables: Tables and plain values of the profile, without the hash.
        usage: Sentence for the header on how to use the profile.
    """
    # Imported here, as only writing needs it: most commands only read profiles, with
    # the standard library.
    import tomlkit

    document = tomlkit.document()
    for line in _HEADER_LINES:
        document.add(tomlkit.comment(line.format(usage)))
    tables_with_hash = tables | {PROFILE_HASH_KEY: canonical_sha256(tables)}
    # Plain values come first: below a table, they would belong to it in TOML.
    for name, value in tables_with_hash.items():
        if not isinstance(value, dict):
            document.add(name, value)
    for name, value in tables_with_hash.items():
        if isinstance(value, dict):
            document.add(name, value)
    return tomlkit.dumps(document)


def profile_from_tables(tables: dict[str, Any], *, where: str) -> tuple[Profile, bool]:
    """Validate the tables of a file as a profile, and compare their hash.

    Args:
        tables: Content of the file, with the recorded hash.
        where: Name of the file in errors.

    Returns:
        The profile, and whether it is intact: its content still has the recorded hash.

    Raises:
        BadInput: If the tables are not a valid profile.
    """
    try:
        profile = parse_table(Profile, _without_hash(tables), where=where)
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error
    is_intact = tables.get(PROFILE_HASH_KEY) == present_sha256(tables, where=where)
    return profile, is_intact


def present_sha256(tables: dict[str, Any], *, where: str) -> str:
    """Compute the hash of a profile's present content, whatever hash it records.

    Args:
        tables: Content of the file, with the recorded hash.
        where: Name of the file in errors.

    Raises:
        BadInput: If a value has no canonical form.
    """
    try:
        return canonical_sha256(_without_hash(tables))
    except (TypeError, ValueError) as error:
        # A date, or a number that is not finite.
        raise BadInput(
            f"{where} contains an unsupported value: {error}",
            next_step="Use numbers, strings, lists and tables only.",
        ) from error


def _without_hash(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables that the hash covers: all but the recorded hash itself."""
    return {key: value for key, value in tables.items() if key != PROFILE_HASH_KEY}
