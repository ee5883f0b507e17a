"""What a profile was held against, and what came of it."""

import shlex
from dataclasses import dataclass
from typing import Literal

from autotune.errors import NotCheckable, ProfileRefused

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
    """The same, later."""
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
