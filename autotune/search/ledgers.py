"""Read the ledger of a profile: its own trials, and how many lie there that are another's."""

from dataclasses import dataclass
from pathlib import Path

from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial
from autotune.core.verification import LedgerCheck
from autotune.decide.ledger import check_ledger, records_of
from autotune.search.profiles import report_directory
from autotune.search.trials import records_in
from autotune.store import LEDGER_DIRECTORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The trials of a ledger that are a profile's own, and what was left out."""

    finished: tuple[FinishedTrial, ...]
    damaged_lines: int
    """That could not be read."""
    check: LedgerCheck
    """What the ledger says of the profile."""


def read_trials(profile_path: Path, profile: Profile, reports: Path) -> Trials:
    """Return every trial behind a profile, and since; none where there is no ledger.

    Raises:
        BadInput: If a file of the ledger is too large to be one.
    """
    records, damaged = records_in(report_directory(profile_path, reports) / LEDGER_DIRECTORY)
    finished = tuple(record.finished() for record in records_of(profile, records))
    return Trials(finished=finished, damaged_lines=damaged, check=check_ledger(profile, records))
