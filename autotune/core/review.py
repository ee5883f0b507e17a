"""Sign-off: verdicts of people on a profile, each bound to what the profile said when it was given."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.core.profile import HASH_KEY
from autotune.errors import BadInput
from trainer.errors import BadConfig
from trainer.schema import Table, canonical_sha256, parse_table

REVIEW_SCHEMA_VERSION: Literal[1] = 1
MOST_NAME_CHARACTERS, MOST_NOTE_CHARACTERS, MOST_PATH_CHARACTERS = 200, 2000, 1000

_SHA256 = r"^[0-9a-f]{64}$"
Sha256 = Annotated[str, Field(pattern=_SHA256)]
Verdict = Literal["approved", "rejected"]
State = Literal["not reviewed", "approved", "rejected", "voided"]


class Review(Table):
    """What somebody said of a profile. The name is a word: nothing here proves who wrote it."""

    profile_sha256: Sha256
    """Of the content that was looked at, as it was then."""
    verdict: Verdict
    by: Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARACTERS)]
    note: Annotated[str, Field(max_length=MOST_NOTE_CHARACTERS)] | None = None
    time_utc: Annotated[str, Field(max_length=40)]
    tool_version: Annotated[str, Field(max_length=40)]
    as_edited: bool = False
    """Whether the content had been changed by hand since it was written, and was approved all the same."""
    profile: Annotated[str, Field(max_length=MOST_PATH_CHARACTERS)] | None = None
    """Where it lay, seen from where the reports lie: profiles of one name share a file of reviews. None where that is
    not known."""


class ReviewFile(Table):
    """``review.json``: every verdict there ever was on a profile of this name, oldest first."""

    schema_version: Literal[1] = REVIEW_SCHEMA_VERSION
    reviews: list[Review] = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a profile stands, as it is now."""

    state: State
    """``voided``: what was approved last is not what the profile says now."""
    present_sha256: str
    """Of what the profile says now."""
    review: Review | None
    """The newest verdict on that; where there is none, the newest on what it said before."""
    place: str | None = None
    """Where the profile lies, as its reviews name it; None where they cannot."""


def standing_of(reviews: list[Review], present_sha256: str, place: str | None = None) -> Standing:
    """How a profile of this content stands: the newest verdict on it counts, wherever it was given.

    Args:
        reviews: Of all profiles of this name, oldest first.
        present_sha256: Of what the profile says now.
        place: Where it lies. Verdicts on what lay elsewhere say nothing of what it said before.
    """
    mine = [review for review in reviews if review.profile_sha256 == present_sha256]
    if mine:
        return Standing(state=mine[-1].verdict, present_sha256=present_sha256, review=mine[-1], place=place)
    before = [review for review in reviews if None in (place, review.profile) or review.profile == place]
    last = before[-1] if before else None
    voided = last is not None and last.verdict == "approved"
    state: State = "voided" if voided else "not reviewed"
    return Standing(state=state, present_sha256=present_sha256, review=last, place=place)


def is_sha256(text: str) -> bool:
    """Whether a text is a hash as this project writes it."""
    return re.fullmatch(_SHA256, text) is not None


def present_sha256(tables: dict[str, Any], *, where: str) -> str:
    """The hash of what a profile's tables say now, whatever hash the file names.

    Raises:
        BadInput: If a value has no canonical form.
    """
    try:
        return canonical_sha256({key: value for key, value in tables.items() if key != HASH_KEY})
    except (TypeError, ValueError) as error:  # a date, or a number that is none
        raise BadInput(
            f"{where} holds a value that no profile has: {error}",
            next_step="Write numbers, texts, lists and tables only.",
        ) from error


def reviews_from_json(value: object, *, where: str) -> list[Review]:
    """Read what a review file held.

    Raises:
        BadInput: If it is of another schema version, or damaged; it is never taken for an empty one.
    """
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != REVIEW_SCHEMA_VERSION:
        raise BadInput(
            f"{where} has schema version {str(version)[:40]!r}; this program reads version {REVIEW_SCHEMA_VERSION}",
            next_step="Restore it from where it is kept; or move it away, and have the profile reviewed again.",
        )
    try:
        return parse_table(ReviewFile, value, where=where).reviews
    except BadConfig as error:
        raise BadInput(
            error.message,
            next_step="Restore it from where it is kept; or move it away, and have the profile reviewed again.",
        ) from error
