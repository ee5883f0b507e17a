"""Trials of a profile in the trial log: reading them, and recording their evidence."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.evidence.baseline import BaselineEvidence
from autotune.evidence.confirm import ConfirmEvidence
from autotune.evidence.explore import ExploreEvidence
from autotune.evidence.network import NetworkEvidence
from autotune.evidence.profile import Fingerprint, Profile, update_profile
from autotune.evidence.workers import WorkersEvidence
from autotune.profiles.checks import TrialLogCheck
from autotune.profiles.decide.trial_log_check import check_trial_log, profile_records
from autotune.trials import trial_log
from autotune.trials.decide.own_records import own_records
from autotune.trials.runner import TrialRunner
from autotune.trials.values import FinishedTrial
from trainer.formats.events import utc_now


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTrials:
    """A profile's trials in the trial log."""

    finished: tuple[FinishedTrial, ...]
    """Trials of the profile, also those after it was written."""
    corrupt_lines: int
    """Number of corrupt lines of the trial log, which were left out."""
    check: TrialLogCheck
    """Comparison of the profile with these trials."""


def read_trials(profile_path: Path, profile: Profile, reports: Path) -> ProfileTrials:
    """Read a profile's trials, and compare the profile with them.

    Args:
        profile_path: Path of the profile.
        profile: Profile at this path.
        reports: Directory of all reports, which has the trial log.

    Raises:
        BadInput: If a file of the trial log exceeds the size limit.
    """
    report_directory = trial_log.report_directory(profile_path, reports)
    directory = report_directory / trial_log.TRIAL_LOG_DIRECTORY
    records, corrupt_lines = trial_log.read_trial_records(directory)
    return ProfileTrials(
        finished=tuple(
            record.finished() for record in profile_records(profile, records)
        ),
        corrupt_lines=corrupt_lines,
        check=check_trial_log(profile, records),
    )


def trial_log_provenance(
    runner: TrialRunner, made_on: Fingerprint, seq_length_tokens: int | None
) -> dict[str, Any]:
    """Return the hash and the last time of a profile's trials so far.

    Args:
        runner: Runner with the trial log.
        made_on: Fingerprint of the profile.
        seq_length_tokens: Sequence length of the profile; None for a profile of your
            own training code, whose trials may have any.

    Returns:
        Fields of ``Provenance`` by their names; the time is None without any trial.
    """
    records, _ = trial_log.read_trial_records(runner.trial_log.directory)
    own = own_records(records, made_on, seq_length_tokens)
    return {
        "trial_log_sha256": trial_log.trial_log_sha256(own),
        "trial_log_until_utc": max((record.time_utc for record in own), default=None),
    }


def add_evidence(
    profile: Profile,
    command: Literal["explore", "workers", "network", "confirm", "baseline"],
    evidence: ExploreEvidence
    | WorkersEvidence
    | NetworkEvidence
    | ConfirmEvidence
    | BaselineEvidence,
    runner: TrialRunner,
    changed: Profile | None = None,
) -> Profile:
    """Return the profile with a command's evidence, in place of its earlier one.

    Args:
        profile: Profile to update.
        command: Command that measured, whose name is that of its table of evidence.
        evidence: Evidence of the command.
        runner: Runner of its trials, with the trial log.
        changed: The profile with other settings; None keeps them.
    """
    provenance = trial_log_provenance(
        runner, profile.fingerprint, profile.seq_length_tokens
    )
    return update_profile(
        profile,
        command=command,
        evidence={command: evidence},
        changed=changed,
        provenance={"created_utc": utc_now(), **provenance},
    )
