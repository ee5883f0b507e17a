"""Read the ledger of a profile: its own trials, and how many lie there that are another's."""

from dataclasses import dataclass
from pathlib import Path

from autotune.core.profile import Fingerprint, Profile
from autotune.core.trial import FinishedTrial
from autotune.core.verification import LedgerCheck
from autotune.decide.ledger import check_ledger, own_records, records_of
from autotune.search.profiles import report_directory
from autotune.search.standing import LEDGER_DIRECTORY
from autotune.search.trials import trial_records
from autotune.store import LedgerContent, read_ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The trials of a ledger that are a profile's own, and what was left out."""

    finished: tuple[FinishedTrial, ...]
    damaged_lines: int
    """That could not be read."""
    check: LedgerCheck
    """What the ledger says of the profile."""


def read_trials(profile_path: Path, profile: Profile, reports: Path) -> Trials:
    """Every trial behind a profile, and since; none where there is no ledger.

    Raises:
        BadInput: If a file of the ledger is too large to be one.
    """
    content = read_ledger(report_directory(profile_path, reports) / LEDGER_DIRECTORY)
    records = trial_records(content)
    own = records_of(profile, records)
    return Trials(
        finished=tuple(record.finished() for record in own),
        damaged_lines=content.damaged_lines + len(content.records) - len(records),
        check=check_ledger(profile, records),
    )


def trials_of_others(content: LedgerContent, here: Fingerprint) -> int:
    """How many trials of a ledger are of another model, dataset or kind of device."""
    records = trial_records(content)
    return len(records) - len(own_records(records, here, None))
