"""Results of comparing a profile with this machine and with its trial log."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autotune.errors import NotCheckable, ProfileRejected

Found = Literal["same", "error", "warning", "info", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Comparison of one field of a profile with this machine."""

    field: str
    found: Found
    """``same``, the severity of a difference, or ``unknown`` if it cannot be checked on
    this machine."""
    profile: str
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
    others: int
    """Trials in the trial log that are not the profile's."""
    unfounded: tuple[str, ...]
    """Figures of the profile that match no trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All checks of a profile."""

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
            differences = "; ".join(
                f"{check.field} is {check.here!r} here,"
                f" {check.profile!r} in the profile"
                for check in errors
            )
            next_step = (
                "Tune here: autotune tune --model MODEL --data DIR; or use the"
                " profile's own machine, model and dataset."
            )
            raise ProfileRejected(
                f"{name} does not match this machine, model or dataset: {differences}",
                next_step=next_step,
                docs=mismatch_docs(check.field for check in errors),
            )
        unknown = [check.field for check in self.with_result("unknown")]
        if unknown:
            command = shlex.join(["autotune", "profile", "verify", name])
            next_step = (
                f"Run it on the machine that trains, with the dataset: {command}"
                " --data DIR"
            )
            if set(unknown) <= {"dataset_hash", "data_filesystem"}:
                next_step = f"Pass the dataset: {command} --data DIR"
            raise NotCheckable(
                f"cannot be verified here: {', '.join(unknown)}", next_step=next_step
            )


def mismatch_docs(fields: Iterable[str]) -> str | None:
    """Return the section of the FAQ about fields of a fingerprint that differ.

    Returns:
        That on datasets if nothing else differs; None for the error's own.
    """
    return "dataset-mismatch" if set(fields) == {"dataset_hash"} else None
