"""Approval of a profile, and comparison of a profile with this machine.

The approval is stored beside the profile's report.
"""

import functools
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.errors import BadInput, ProfileRejected
from autotune.profiles.decide.follow_up import command
from autotune.profiles.store import StoredProfile, read_profile
from autotune.profiles.toml_file import present_sha256
from autotune.profiles.values import (
    Approval,
    ApprovalRecord,
    Decision,
    approval_of,
    is_sha256,
)
from autotune.trials.trial_log import report_directory
from trainer.config.resolve import (
    PROFILE_HASH_KEY,
    profile_sha256,
    read_profile_tables,
)
from trainer.config.tables import flat_table, parse_table, read_json
from trainer.config.train_config import TrainConfig
from trainer.errors import BadConfig, UnreadableFile
from trainer.health.events import utc_now

_MOST_REVIEW_BYTES = 2**20


# Without slots, as it is a second base of other classes.
@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a profile's file, whatever its tables, and its approval."""

    intact: bool
    """True if it still has the hash that it was written with."""
    recorded_sha256: str | None
    """Hash that the file names; None if it names none."""
    file_sha256: str
    """Hash of the whole file, the recorded hash included, by which runs identify the
    profile."""
    approval: Approval


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovedProfile(StoredProfile, Content):
    """A profile's present content and its approval."""


def read_with_approval(profile: Path, reports: Path) -> ApprovedProfile:
    """Read a profile once, with the approval of exactly that content.

    Raises:
        BadInput: If the profile is invalid, or its review is corrupt.
        BadConfig: If its file cannot be read.
    """
    tables = read_profile_tables(profile)
    stored = read_profile(profile, tables)
    return ApprovedProfile(
        path=profile,
        profile=stored.profile,
        **vars(read_content(profile, tables, reports)),
    )


def read_content(profile: Path, tables: dict[str, Any], reports: Path) -> Content:
    """Return the hashes and the approval of a profile's ``tables``.

    Raises:
        BadInput: If its review is corrupt.
    """
    recorded = tables.get(PROFILE_HASH_KEY)
    present = present_sha256(tables, where=str(profile))
    recorded_sha256 = None
    if isinstance(recorded, str) and is_sha256(recorded):
        recorded_sha256 = recorded
    return Content(
        intact=recorded == present,
        recorded_sha256=recorded_sha256,
        file_sha256=profile_sha256(tables),
        approval=approval_of(_read_review(review_path(profile, reports)), present),
    )


def review_path(profile: Path, reports: Path) -> Path:
    """Return the path of a profile's review."""
    return report_directory(profile, reports) / "review.json"


def _read_review(path: Path) -> ApprovalRecord | None:
    """Return the review; None without a file.

    Raises:
        BadInput: If the file is corrupt.
        UnreadableFile: If it may be intact, but cannot be read.
    """
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
    read: Callable[[Path, Path], Content] = read_with_approval,
) -> None:
    """Store an approval or rejection of a profile's present content.

    It replaces the last one.

    Args:
        profile: Path of the profile.
        reports: Directory of all reports.
        decision: The decision on its present content.
        by: Name of the reviewer.
        note: Comment of the reviewer.
        as_edited: True to approve a profile that was edited since it was written.
        read: Function that reads and validates the profile, which may be one of your
            own training code.

    Raises:
        ProfileRejected: If the profile is to be approved, was edited, and ``as_edited``
            is not set.
        BadConfig: If the name or the note cannot be used.
        TrainerError: If the profile cannot be used.
        AutotuneError: If the profile or its review cannot be used.
    """
    content = read(profile, reports)
    is_approved_edit = decision == "approved" and not content.intact
    if is_approved_edit and not as_edited:
        raise _edited_error(profile, content)
    fields = {
        "profile_sha256": content.approval.present_sha256,
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


def _edited_error(profile: Path, content: Content) -> ProfileRejected:
    """Return the error about approving a profile that was edited."""
    recorded = "none"
    if content.recorded_sha256 is not None:
        recorded = _short_hash(content.recorded_sha256)
    present = _short_hash(content.approval.present_sha256)
    return ProfileRejected(
        f"{profile} was modified after measurement (recorded hash {recorded},"
        f" present hash {present}): its figures may not hold for its settings",
        next_step=(
            f"Check the settings: autotune profile show {shlex.quote(str(profile))}"
            " --explain. Then add --as-edited to approve them, or measure them:"
            " autotune tune."
        ),
    )


def require_approved(
    profile: Path, reports: Path, *, expect_sha256: str | None = None
) -> ApprovedProfile:
    """Return a profile that is approved as it is.

    Raises:
        ProfileRejected: If it is not, or has another hash.
    """
    approved = read_with_approval(profile, reports)
    reject_unapproved(approved, profile, reports, expect_sha256=expect_sha256)
    return approved


def reject_unapproved(
    content: Content, profile: Path, reports: Path, *, expect_sha256: str | None = None
) -> None:
    """Raise an error unless a profile's present content is approved.

    Args:
        content: Content of the profile.
        profile: Path of the profile.
        reports: Directory of all reports.
        expect_sha256: Hash that the file must have; None accepts any.

    Raises:
        ProfileRejected: If it is not approved, or has another hash.
    """
    state = content.approval.state
    review = content.approval.review
    present_hash = _short_hash(content.approval.present_sha256)
    approve = command("profile approve", profile)
    reports_option = shlex.join(["--reports", str(reports)])
    next_step = f"Review and approve it: {approve} --by NAME {reports_option}"
    if state == "approved":
        if expect_sha256 is None or expect_sha256 == content.file_sha256:
            return
        reason = (
            "does not match this job: its hash is"
            f" {_short_hash(content.file_sha256)}, the job was written for"
            f" {_short_hash(expect_sha256)}"
        )
        next_step = (
            f"Write the job again: {command('train', profile, slurm=True)}; or undo the"
            " change."
        )
    elif state == "not reviewed" or review is None:
        reason = f"is not approved (hash {present_hash})"
    elif state == "rejected":
        reason = f"was rejected by {review.by!r} at {review.time_utc}"
        next_step = f"See the reason: {approve} {reports_option}"
    else:
        reason = (
            f"was modified since {review.by!r} approved it at {review.time_utc}: hash"
            f" {_short_hash(review.profile_sha256)} then, {present_hash} now"
        )
    raise ProfileRejected(f"{profile} {reason}", next_step=next_step)


def reject_other_settings(approved: ApprovedProfile, requested: TrainConfig) -> None:
    """Raise an error if the command line changes an approved profile.

    Raises:
        ProfileRejected: With all changed settings.
    """
    # As text: in Python 1, 1.0 and True are equal.
    as_text = functools.partial(json.dumps, sort_keys=True)
    approved_tables = approved.profile.train.model_dump(mode="json")
    requested_tables = requested.model_dump(mode="json")
    if as_text(approved_tables) == as_text(requested_tables):
        return
    approved_settings = flat_table(approved_tables)
    changes = []
    for key, value in flat_table(requested_tables).items():
        approved_value = approved_settings.get(key)
        if as_text(value) != as_text(approved_value):
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


def _short_hash(sha256: str) -> str:
    return f"{sha256[:12]}…"
