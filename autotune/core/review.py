"""Sign-off: the last verdict on a profile, bound to what the profile said when it was given. Pure."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from trainer.schema import Table

_SHA256 = r"^[0-9a-f]{64}$"
Verdict = Literal["approved", "rejected"]
State = Literal["not reviewed", "approved", "rejected", "voided"]


class Review(Table):
    """``review.json``: the last verdict. The name is a word: nothing here proves who wrote it."""

    schema_version: Literal[2] = 2
    profile_sha256: Annotated[str, Field(pattern=_SHA256)]
    """Of the content that was looked at."""
    verdict: Verdict
    by: Annotated[str, Field(min_length=1, max_length=200)]
    note: Annotated[str, Field(max_length=2000)] | None = None
    time_utc: Annotated[str, Field(max_length=40)]
    as_edited: bool = False
    """Whether the content had been changed by hand since it was written, and was approved all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a profile stands, as it is now."""

    state: State
    """``voided``: what was approved last is not what the profile says now."""
    present_sha256: str
    review: Review | None
    """The verdict on that, or on what it said before."""


def standing_of(review: Review | None, present_sha256: str) -> Standing:
    """How a profile of this content stands: a verdict counts for just the content that it was given on."""
    state: State = "not reviewed"
    if review is not None and review.profile_sha256 == present_sha256:
        state = review.verdict
    elif review is not None and review.verdict == "approved":
        state = "voided"
    return Standing(state=state, present_sha256=present_sha256, review=review)


def is_sha256(text: str) -> bool:
    """Whether a text is a hash as this project writes it."""
    return re.fullmatch(_SHA256, text) is not None
