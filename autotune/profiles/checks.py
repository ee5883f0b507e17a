"""Results of comparing a profile with this machine and with its trial log."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.errors import NotCheckable, ProfileRejected

CheckResult = Literal["same", "error", "warning", "info", "unknown", "not compared"]
"""Result of a check: ``same``; the severity of a difference (``error``, ``warning``,
``info``); ``unknown`` if this machine has no value to compare with; or ``not compared``
if no machine has one until you measure again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Comparison of one field of a profile with this machine."""

    field: str
    """Name of a field of ``Fingerprint``, or dotted name of a setting."""
    found: CheckResult
    """Result of the comparison."""
    profile: str
    """Value in the profile."""
    here: str
    """Value on this machine, or the reason why it is not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLogCheck:
    """Comparison of a profile with the trial log beside it."""

    found: Literal["same", "differs", "not recomputable", "no trials"]
    """Result of comparing the hash of the profile's trials with the recorded one.

    ``same``: no trial was changed, removed or inserted since the profile was written.
    ``differs``: one was. ``not recomputable``: the profile, of an older version, does
    not record the time of the last trial that the hash covers. ``no trials``: the trial
    log has no trial of the profile.
    """
    trials: int
    """Number of the profile's trials up to the time that the profile records: those of
    its model, dataset and sequence length."""
    added: int
    """Number of the profile's trials after that time."""
    others: int
    """Number of trials in the trial log that are not the profile's."""
    unfounded: tuple[str, ...]
    """Figures of the profile that match no trial, by their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All checks of a profile against this machine."""

    checks: tuple[Check, ...]

    def with_result(self, result: CheckResult) -> tuple[Check, ...]:
        """Return the checks with this result."""
        return tuple(check for check in self.checks if check.found == result)

    def raise_if_bad(self, name: str) -> None:
        """Raise an error if the result of a check is ``error`` or ``unknown``.

        Args:
            name: Path of the profile, for the message.

        Raises:
            ProfileRejected: If a difference invalidates the profile's figures.
            NotCheckable: If no difference does so, but a field could not be compared.
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
    """Return the section of the FAQ that an error about differing fields links.

    Args:
        fields: Fields of the fingerprint that differ.

    Returns:
        The section on datasets if only the dataset differs; None otherwise, so that the
        error links its default section.
    """
    return "dataset-mismatch" if set(fields) == {"dataset_hash"} else None
