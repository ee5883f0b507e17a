"""What a profile was held against and what came of it; and sign-off, bound to what the profile said. Pure."""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from autotune.errors import NotCheckable, ProfileRefused
from trainer.config.tables import Table

Found = Literal["same", "refuse", "warn", "inform", "not checkable here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a profile says, held against what is here."""

    field: str
    found: Found
    """``same``, or how much it matters that it differs, or that nobody here can tell."""
    profile: str
    here: str
    """Or why nobody here can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCheck:
    """What the ledger beside a profile says of it."""

    found: Literal["same", "differs", "not recomputable", "no trials"]
    """Whether the trials it rests on are what they were when it was written: all of them, none changed, none added.
    ``not recomputable``: the profile does not say up to when they count. ``no trials``: none of it are here."""
    trials: int
    """Of the profile's model, dataset and rows, up to when it was written."""
    added: int
    others: int
    """Trials in the same ledger that are not the profile's."""
    unfounded: tuple[str, ...]
    """Figures of the profile that no trial gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All checks of a profile."""

    checks: tuple[Check, ...]
    ledger: LedgerCheck | None = None
    """None where nobody looked."""

    def of(self, found: Found) -> tuple[Check, ...]:
        """Those with such a result."""
        return tuple(check for check in self.checks if check.found == found)

    def raise_if_bad(self, name: str) -> None:
        """Say the worst as an error.

        Raises:
            ProfileRefused: If something differs that the figures cannot bear.
            NotCheckable: If nothing does, and something cannot be told here.
        """
        if refused := self.of("refuse"):
            told = "; ".join(f"{check.field} was {check.profile!r}, here it is {check.here!r}" for check in refused)
            raise ProfileRefused(
                f"{name} does not belong here: {told}",
                next_step="Tune for what is here: autotune tune; or use the profile where it was made.",
            )
        if unknown := self.of("not checkable here"):
            raise NotCheckable(
                f"not checkable here: {', '.join(check.field for check in unknown)}",
                next_step="Run it where the profile is for, and its dataset is: "
                + shlex.join(["autotune", "profile", "verify", name]),
            )


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
