"""Approval of a profile, stored as ``review.json`` beside its report.

An approval holds for the content that it names: any later edit voids it.
"""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from autotune.base.files import write_atomically
from autotune.errors import BadInput, ProfileRejected
from autotune.evidence.profile import is_sha256
from autotune.profiles.approval_record import (
    Approval,
    ApprovalRecord,
    Decision,
    approval_of,
    short_hash,
)
from autotune.profiles.decide.follow_up import command
from autotune.profiles.store import StoredProfile, read_profile, read_tables
from autotune.profiles.toml_file import present_sha256
from autotune.trials.trial_log import report_directory
from trainer.formats.errors import BadConfig, UnreadableFile
from trainer.formats.events import utc_now
from trainer.formats.nested_tables import flatten_table
from trainer.formats.profile_file import PROFILE_HASH_KEY, profile_sha256
from trainer.formats.tables import parse_table, read_json
from trainer.formats.train_config import TrainConfig

_MOST_REVIEW_BYTES = 2**20
"""Limit of a review's file, far above the few thousand characters that a review may
have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWithApproval(StoredProfile):
    """A profile with the hashes and the approval of its present content.

    The approval may be missing, voided, or a rejection.
    """

    recorded_sha256: str | None
    """Hash that the file records; None if it records no valid one."""
    file_sha256: str
    """Hash of the whole file, the recorded hash included, by which runs identify the
    profile."""
    approval: Approval


def read_with_approval(profile: Path, reports: Path) -> ProfileWithApproval:
    """Read a profile with the approval of its content.

    Args:
        profile: Path of the profile.
        reports: Directory of all reports.

    Raises:
        BadInput: If the profile is invalid, or its review is corrupt.
        BadConfig: If a file cannot be read.
    """
    # Read once: between two reads, another process may write another profile.
    tables = read_tables(profile)
    stored = read_profile(profile, tables)
    recorded = tables.get(PROFILE_HASH_KEY)
    recorded_sha256 = None
    # A foreign profile may hold any value in place of the hash.
    if isinstance(recorded, str) and is_sha256(recorded):
        recorded_sha256 = recorded
    present = present_sha256(tables, where=str(profile))
    review = _read_review(review_path(profile, reports))
    return ProfileWithApproval(
        path=profile,
        profile=stored.profile,
        intact=stored.intact,
        recorded_sha256=recorded_sha256,
        file_sha256=profile_sha256(tables),
        approval=approval_of(review, present),
    )


def review_path(profile: Path, reports: Path) -> Path:
    """Return the path of a profile's review."""
    return report_directory(profile, reports) / "review.json"


def _read_review(path: Path) -> ApprovalRecord | None:
    """Return the review in a file; None if there is no file.

    Raises:
        BadInput: If the file is corrupt.
        UnreadableFile: If the file may be intact, but cannot be read.
    """
    # A broken link is a file that cannot be read, not a missing one.
    if not os.path.lexists(path):
        return None
    try:
        table = read_json(path, max_bytes=_MOST_REVIEW_BYTES)
        return parse_table(ApprovalRecord, table, where=str(path))
    except UnreadableFile:
        raise
    except BadConfig as error:
        next_step = (
            "Restore it from a backup; or move it away and approve the profile again."
        )
        raise BadInput(error.message, next_step=next_step) from error


def review(
    profile: Path,
    reports: Path,
    decision: Decision,
    *,
    by: str,
    note: str | None,
    as_edited: bool = False,
) -> None:
    """Store a review of a profile's present content, in place of its last review.

    Args:
        profile: Path of the profile.
        reports: Directory of all reports.
        decision: Decision on the present content.
        by: Name of the reviewer.
        note: Comment of the reviewer.
        as_edited: True to approve a profile that was edited since it was written.

    Raises:
        ProfileRejected: If an edited profile is approved without ``as_edited``.
        BadConfig: If the name is empty, or the name or note is too long.
        TrainerError: If the profile cannot be read.
        AutotuneError: If the profile is invalid, or its review is corrupt.
    """
    stored = read_with_approval(profile, reports)
    is_approved_edit = decision == "approved" and not stored.intact
    if is_approved_edit and not as_edited:
        raise _edited_error(stored)
    fields = {
        "profile_sha256": stored.approval.present_sha256,
        "decision": decision,
        "by": by.strip(),
        "note": note,
        "time_utc": utc_now(),
        "as_edited": is_approved_edit,
    }
    record = parse_table(ApprovalRecord, fields, where="review")
    # Escaped to ASCII, so that the file cannot contain control sequences for a
    # terminal.
    text = json.dumps(record.model_dump(mode="json"), indent=2)
    write_atomically(review_path(profile, reports), f"{text}\n")


def _edited_error(stored: ProfileWithApproval) -> ProfileRejected:
    """Return the error about approving a profile that was edited."""
    recorded = "none"
    if stored.recorded_sha256 is not None:
        recorded = f"{short_hash(stored.recorded_sha256)}…"
    present = f"{short_hash(stored.approval.present_sha256)}…"
    return ProfileRejected(
        f"{stored.path} was modified after measurement (recorded hash {recorded},"
        f" present hash {present}): its figures may not hold for its settings",
        next_step=(
            f"Check the settings: autotune profile show {shlex.quote(str(stored.path))}"
            " --explain. Then add --as-edited to approve them, or measure them:"
            " autotune tune."
        ),
    )


def require_approved(
    profile: Path, reports: Path, *, expect_sha256: str | None = None
) -> ProfileWithApproval:
    """Read a profile whose present content must be approved.

    Args:
        profile: Path of the profile.
        reports: Directory of all reports.
        expect_sha256: Hash that the file must have; None accepts any.

    Raises:
        ProfileRejected: If it is not approved, or has another hash than expected.
        BadInput: If the profile is invalid, or its review is corrupt.
        BadConfig: If a file cannot be read.
    """
    stored = read_with_approval(profile, reports)
    reject_unapproved(stored, reports, expect_sha256=expect_sha256)
    return stored


def reject_unapproved(
    stored: ProfileWithApproval, reports: Path, *, expect_sha256: str | None = None
) -> None:
    """Raise an error unless a profile's present content is approved.

    Args:
        stored: The profile.
        reports: Directory of all reports.
        expect_sha256: Hash that the file must have; None accepts any.

    Raises:
        ProfileRejected: If it is not approved, or has another hash than expected.
    """
    if stored.approval.state != "approved":
        raise _unapproved_error(stored.approval, stored.path, reports)
    if expect_sha256 is not None and expect_sha256 != stored.file_sha256:
        job = command("train", stored.path, slurm=True)
        raise ProfileRejected(
            f"{stored.path} does not match this job: its hash is"
            f" {short_hash(stored.file_sha256)}…, the job was written for"
            f" {short_hash(expect_sha256)}…",
            next_step=f"Write the job again: {job}; or undo the change.",
        )


def _unapproved_error(
    approval: Approval, profile: Path, reports: Path
) -> ProfileRejected:
    """Return the error about a profile whose present content is not approved."""
    review = approval.review
    present_hash = f"{short_hash(approval.present_sha256)}…"
    approve = command("profile approve", profile)
    reports_option = shlex.join(["--reports", str(reports)])
    next_step = f"Review and approve it: {approve} --by NAME {reports_option}"
    if approval.state == "not reviewed" or review is None:
        reason = f"is not approved (hash {present_hash})"
    elif approval.state == "rejected":
        reason = f"was rejected by {review.by!r} at {review.time_utc}"
        next_step = f"See the reason: {approve} {reports_option}"
    else:
        reason = (
            f"was modified since {review.by!r} approved it at {review.time_utc}: hash"
            f" {short_hash(review.profile_sha256)}… then, {present_hash} now"
        )
    return ProfileRejected(f"{profile} {reason}", next_step=next_step)


def reject_other_settings(
    approved: ProfileWithApproval, requested: TrainConfig
) -> None:
    """Raise an error if the command line changes an approved profile.

    Args:
        approved: Approved profile.
        requested: Settings of the profile, with those of the command line.

    Raises:
        ProfileRejected: If a setting differs; the message names each.
    """
    approved_tables = approved.profile.train.model_dump(mode="json")
    requested_tables = requested.model_dump(mode="json")
    if _as_text(approved_tables) == _as_text(requested_tables):
        return
    approved_settings = flatten_table(approved_tables)
    changes = []
    for key, value in flatten_table(requested_tables).items():
        approved_value = approved_settings.get(key)
        if _as_text(value) != _as_text(approved_value):
            name = f"train.{key}"
            changes.append(f"{name!r} = {value!r} instead of {approved_value!r}")
    raise ProfileRejected(
        f"--set would change the approved profile {approved.path}: "
        + ", ".join(changes),
        next_step=(
            "Omit --set; or write the value into the profile and approve it: autotune"
            " profile approve."
        ),
    )


def _as_text(value: object) -> str:
    """Return a value as JSON, which tells 1, 1.0 and true apart; Python does not."""
    return json.dumps(value, sort_keys=True)
