"""The classes of kinds of subjects: of this project, and of installed packages."""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.base.subject_kinds import subject_kinds
from autotune.errors import BadInput, ProfileRejected
from autotune.evidence.profile import Profile, SubjectTable
from autotune.profiles.store import StoredProfile
from autotune.subjects.subject import Argument, Subject


def subject_class(kind: str) -> type[Subject]:
    """Return the class of a kind.

    Raises:
        BadInput: If there is no such kind, or its package cannot be imported.
    """
    kinds = subject_kinds()
    if kind not in kinds:
        raise BadInput(
            f"there is no kind of subject {kind!r}",
            next_step=f"Choose one of {', '.join(kinds)}.",
        )
    module, _, attribute = kinds[kind].partition(":")
    try:
        loaded: type[Subject] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"the kind of subject {kind!r} cannot be imported from {kinds[kind]}:"
            f" {error}",
            next_step=f"Install or repair its package: python -c 'import {module}'",
        ) from error
    return loaded


def profile_subject(profile: Profile, data: Path = Path()) -> Subject:
    """Return the subject of a profile.

    Args:
        profile: The profile.
        data: Directory of its dataset, if it has one.

    Raises:
        BadInput: If its kind is not known here.
        BadConfig: If it needs a dataset, and there is none.
    """
    stored = profile.subject
    table: dict[str, Any] = dict(stored.table)
    if profile.has_train:
        # [train] is its table.
        table = {"config": profile.train, "data": str(data)}
    return subject_class(stored.kind).from_table(table)


def require_kind(stored: StoredProfile, subject: Subject) -> None:
    """Check that a profile is of the kind of a subject.

    Raises:
        ProfileRejected: If it is of another kind.
    """
    kind = stored.profile.subject.kind
    if kind != subject.kind:
        raise ProfileRejected(
            f"{stored.path} does not match: it is of the kind {kind}, and"
            f" {subject.words} of the kind {subject.kind}",
            next_step="Name another directory of profiles: --out DIR",
        )


def argument_names(subject: Subject, settings: Iterable[str]) -> dict[str, str]:
    """Return the names of settings in the subject's own configuration, by ours."""
    fixed, names = subject.apply({}), {}
    for setting in settings:
        applied = [name for name in subject.apply({setting: 0}) if name not in fixed]
        names[setting] = ", ".join(applied) or setting
    return names


def merged_subject(stored: SubjectTable, given: Subject) -> Subject:
    """Return the subject of a profile, with what the command line gives in addition.

    Arguments and functions of the command line come first.

    Raises:
        BadInput: If the kind of the profile's subject is not known here.
    """
    table = given.table()
    arguments: dict[str, Argument] = {}
    for source in (stored.table, table):
        arguments |= dict(source.get("arguments", {}))
    known = {name: value for name, value in table.items() if value is not None}
    return subject_class(stored.kind).from_table(
        {**stored.table, **known, "arguments": arguments}
    )
