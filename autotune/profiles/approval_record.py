"""Record of a review of a profile, and the approval that follows from it. Pure."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from autotune.evidence.profile import SHA256_PATTERN
from trainer.formats.tables import StrictTable

Decision = Literal["approved", "rejected"]
"""Decision of a reviewer."""
ApprovalState = Literal["not reviewed", "approved", "rejected", "voided"]
"""State of a profile's present content: the decision on it, ``voided`` if only earlier
content was approved, else ``not reviewed``."""
_SHOWN_HASH_DIGITS = 12
"""First digits of a hash that messages show, enough to tell two contents apart."""


class ApprovalRecord(StrictTable):
    """The last approval or rejection, in ``review.json``.

    The name in it is not authenticated.
    """

    schema_version: Literal[2] = 2
    """Version of the format of ``review.json``."""
    profile_sha256: Annotated[str, Field(pattern=SHA256_PATTERN)]
    """Hash of the reviewed content."""
    decision: Decision
    """Decision on this content."""
    by: Annotated[str, Field(min_length=1, max_length=200)]
    """Name of the reviewer, as given on the command line."""
    note: Annotated[str, Field(max_length=2000)] | None = None
    """Comment of the reviewer."""
    time_utc: Annotated[str, Field(max_length=40)]
    """Time of the review, in ISO 8601."""
    as_edited: bool = False
    """True if the content was approved although it was modified after it was
    written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """Approval of a profile's present content."""

    state: ApprovalState
    """Decision that counts for the present content."""
    present_sha256: str
    """Hash of the present content."""
    review: ApprovalRecord | None
    """Last approval or rejection, of the present content or of an earlier one."""


def approval_of(review: ApprovalRecord | None, present_sha256: str) -> Approval:
    """Return the approval of a profile's present content.

    A review counts only for the content that it names; the approval of another content
    is void.
    """
    state: ApprovalState = "not reviewed"
    if review is not None and review.profile_sha256 == present_sha256:
        state = review.decision
    elif review is not None and review.decision == "approved":
        state = "voided"
    return Approval(state=state, present_sha256=present_sha256, review=review)


def short_hash(sha256: str) -> str:
    """Return the first digits of a hash."""
    return sha256[:_SHOWN_HASH_DIGITS]
