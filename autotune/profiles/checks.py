"""Results of comparing a profile with this machine and with its trial log."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.errors import NotCheckable, ProfileRejected

Found = Literal["same", "error", "warning", "info", "unknown"]
"""Result of a check: ``same``, the severity of a difference, or ``unknown`` if this
machine has no value to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Comparison of one field of a profile with this machine."""

    field: str
    """Name of the field, as in ``Fingerprint``; dotted for a setting."""
    found: Found
    profile: str
    """Value in the profile."""
    here: str
    """Value on this machine, or the reason why it cannot be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLogCheck:
    """Comparison of a profile with the trial log beside it."""

    found: Literal["same", "differs", "not recomputable", "no trials"]
    """``same`` if no trial was changed, removed or inserted since the profile was
    written. ``not recomputable`` if the profile does not record up to when trials
    count. ``no trials`` if the log has none of it."""
    trials: int
    """Trials of the profile's model, dataset and sequence length, up to the time it was
    written."""
    added: int
    """Trials of the profile that were added since it was written."""
    others: int
    """Trials in the trial log that are not the profile's."""
    unfounded: tuple[str, ...]
    """Figures of the profile that match no trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All checks of a profile, which raise an error if one of them fails."""

    checks: tuple[Check, ...]

    def with_result(self, result: Found) -> tuple[Check, ...]:
        """Return the checks with this result."""
        return tuple(check for check in self.checks if check.found == result)

    def raise_if_bad(self, name: str) -> None:
        """Raise an error unless every field was compared and none is an error.

        Raises:
            ProfileRejected: If a difference invalidates the figures.
            NotCheckable: If some differences are unknown.
        """
        errors = self.with_result("error")
        if errors:
            raise _mismatch_error(name, errors)
        unknown = self.with_result("unknown")
        if unknown:
            raise _not_checkable_error(name, [check.field for check in unknown])


def _mismatch_error(name: str, errors: Sequence[Check]) -> ProfileRejected:
    """Return the error about fields that invalidate a profile's figures."""
    differences = "; ".join(
        f"{check.field} is {check.here!r} here, {check.profile!r} in the profile"
        for check in errors
    )
    return ProfileRejected(
        f"{name} does not match this machine, model or dataset: {differences}",
        next_step=(
            "Tune here: autotune tune --model MODEL --data DIR; or use the profile's"
            " own machine, model and dataset."
        ),
        docs=mismatch_docs(check.field for check in errors),
    )


def _not_checkable_error(name: str, fields: Sequence[str]) -> NotCheckable:
    """Return the error about fields that cannot be compared on this machine."""
    command = shlex.join(["autotune", "profile", "verify", name])
    next_step = (
        f"Run it on the machine that trains, with the dataset: {command} --data DIR"
    )
    if set(fields) <= {"dataset_hash", "data_filesystem"}:
        next_step = f"Pass the dataset: {command} --data DIR"
    return NotCheckable(
        f"cannot be verified here: {', '.join(fields)}", next_step=next_step
    )


def mismatch_docs(fields: Iterable[str]) -> str | None:
    """Return the section of the FAQ about fields of a fingerprint that differ.

    Returns:
        Section on datasets if only the dataset differs; None for the error's section.
    """
    return "dataset-mismatch" if set(fields) == {"dataset_hash"} else None
