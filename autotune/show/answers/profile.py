"""What ``autotune profile … --json`` answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.profile import Profile
from autotune.core.review import State
from autotune.core.verification import Check, LedgerCheck
from autotune.decide.changes import Change, ProfileChanges


class ShownProfile(Profile):
    """``profile show``: the profile, and how it stands."""

    intact: bool
    """Whether its content still has the hash it was written with."""
    review: State


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSetting:
    """One field that differs; null on the side that does not have it."""

    key: str
    """Dotted; a row of a list is named by what it is of: ``probe.curve[rows=16].step_s``."""
    old: Any
    new: Any
    ratio: float | None
    """The new figure over the old one; null where they are not both figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffAnswer:
    """``profile diff``: what one profile has otherwise than another."""

    a: str
    b: str
    same_settings: bool
    """Whether both train the same."""
    train: tuple[ChangedSetting, ...]
    constraints: tuple[ChangedSetting, ...]
    fingerprint: tuple[ChangedSetting, ...]
    evidence: tuple[ChangedSetting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyAnswer:
    """``profile verify``: a profile held against this machine and its ledger."""

    profile: str
    intact: bool
    """Whether its content still has the hash it was written with."""
    review: State
    ledger: LedgerCheck
    checks: tuple[Check, ...]


def shown_profile(profile: Profile, *, intact: bool, review: State) -> ShownProfile:
    """The profile, and how it stands."""
    tables = {name: getattr(profile, name) for name in Profile.model_fields}
    return ShownProfile(**tables, intact=intact, review=review)


def diff_answer(a: str, b: str, changes: ProfileChanges) -> DiffAnswer:
    """All that differs, by table."""
    return DiffAnswer(
        a=a,
        b=b,
        same_settings=not changes.train,
        train=_changed(changes.train),
        constraints=_changed(changes.constraints),
        fingerprint=_changed(changes.fingerprint),
        evidence=_changed(changes.evidence),
    )


def _changed(changes: Sequence[Change]) -> tuple[ChangedSetting, ...]:
    return tuple(
        ChangedSetting(key=change.key, old=change.old, new=change.new, ratio=change.ratio) for change in changes
    )
