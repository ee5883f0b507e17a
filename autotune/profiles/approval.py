"""Approval of a profile, stored beside its report, and comparison of a profile with this machine."""

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
from autotune.machine.host import Host
from autotune.machine.measured_device import fingerprint, open_device
from autotune.machine.nvml import GpuMonitor
from autotune.profiles.decide.follow_up import command
from autotune.profiles.decide.trial_log_check import check_fields
from autotune.profiles.store import StoredProfile, read_profile
from autotune.profiles.values import (
    HASH_KEY,
    Approval,
    ApprovalRecord,
    Check,
    Decision,
    Fingerprint,
    Verification,
    approval_of,
    is_sha256,
    present_sha256,
)
from autotune.trials.trial_log import report_directory
from trainer.config.resolve import profile_sha256, read_profile_tables
from trainer.config.tables import flat_table, parse_table, read_json
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import read_manifest
from trainer.errors import BadConfig, TrainerError
from trainer.health.events import utc_now

_MOST_BYTES = 2**20
_TOLD_ANYWHERE = (
    "model_sha256",
    "dataset_hash",
    "data_filesystem",
    "torch",
    "transformers",
    "python",
)
"""Fingerprint fields that can be checked without the profile's GPU and host."""


@dataclass(frozen=True, kw_only=True)  # no slots: it is a second base of other classes
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

    Raise an error if either cannot be used.
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
    recorded, present = tables.get(HASH_KEY), present_sha256(tables, where=str(profile))
    return Content(
        intact=recorded == present,
        recorded_sha256=(
            recorded if isinstance(recorded, str) and is_sha256(recorded) else None
        ),
        file_sha256=profile_sha256(tables),
        approval=approval_of(_read(review_path(profile, reports)), present),
    )


def review_path(profile: Path, reports: Path) -> Path:
    """Return the path of a profile's review."""
    return report_directory(profile, reports) / "review.json"


def _read(path: Path) -> ApprovalRecord | None:
    """Return the review.

    None without a file. Raise ``BadInput`` if the file is corrupt.
    """
    if not os.path.lexists(path):
        return None
    try:
        return parse_table(
            ApprovalRecord, read_json(path, max_bytes=_MOST_BYTES), where=str(path)
        )
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
    """Store an approval or rejection of a profile's present content, replacing the last one.

    ``read`` reads and validates the profile, which may be one of your own training
    code.

    Raise ``ProfileRejected`` if it is to be approved, was edited since it was written,
    and ``as_edited`` is not set; ``TrainerError`` or ``AutotuneError`` if the name, the
    note, the profile or its review cannot be used.
    """
    before = read(profile, reports)
    present, recorded = before.approval.present_sha256, before.recorded_sha256
    if decision == "approved" and not before.intact and not as_edited:
        written = "none" if recorded is None else _short(recorded)
        raise ProfileRejected(
            f"{profile} was modified after measurement (recorded hash {written},"
            f" present hash {_short(present)}): its figures may not hold for its"
            " settings",
            next_step=(
                f"Check the settings: autotune profile show {shlex.quote(str(profile))}"
                " --explain. Then add --as-edited to approve them, or measure them:"
                " autotune tune."
            ),
        )
    edited = decision == "approved" and not before.intact
    said = {
        "decision": decision,
        "by": by.strip(),
        "note": note,
        "time_utc": utc_now(),
        "as_edited": edited,
    }
    mine = parse_table(
        ApprovalRecord, {"profile_sha256": present, **said}, where="review"
    )
    # Escaped to ASCII, so that the file cannot contain control sequences for a
    # terminal.
    write_atomically(
        review_path(profile, reports),
        json.dumps(mine.model_dump(mode="json"), indent=2) + "\n",
    )


def require_approved(
    profile: Path, reports: Path, *, expect_sha256: str | None = None
) -> ApprovedProfile:
    """Return a profile that is approved as it is.

    Raises:
        ProfileRejected: If it is not, or has another hash.
    """
    found = read_with_approval(profile, reports)
    reject_unapproved(found, profile, reports, expect_sha256=expect_sha256)
    return found


def reject_unapproved(
    found: Content, profile: Path, reports: Path, *, expect_sha256: str | None = None
) -> None:
    """Raise ``ProfileRejected`` if a profile's present content is not approved, or has another hash than expected."""
    state, last, now = (
        found.approval.state,
        found.approval.review,
        _short(found.approval.present_sha256),
    )
    approve, at = (
        command("profile approve", profile),
        shlex.join(["--reports", str(reports)]),
    )
    next_step = f"Review and approve it: {approve} --by NAME {at}"
    if state == "approved":
        if expect_sha256 in (None, found.file_sha256):
            return
        why = (
            f"does not match this job: its hash is {_short(found.file_sha256)}, the job"
            " was written for "
        )
        why += _short(expect_sha256)
        next_step = (
            f"Write the job again: {command('train', profile, slurm=True)}; or undo the"
            " change."
        )
    elif state == "not reviewed" or last is None:
        why = f"is not approved (hash {now})"
    elif state == "rejected":
        why, next_step = (
            f"was rejected by {last.by!r} at {last.time_utc}",
            f"See the reason: {approve} {at}",
        )
    else:
        why = f"was modified since {last.by!r} approved it at {last.time_utc}: "
        why += f"hash {_short(last.profile_sha256)} then, {now} now"
    raise ProfileRejected(f"{profile} {why}", next_step=next_step)


def reject_other_settings(approved: ApprovedProfile, asked: TrainConfig) -> None:
    """Raise ``ProfileRejected``, with all changed settings, if the command line changes an approved profile."""
    train = approved.profile.train
    # As text: in Python 1, 1.0 and True are equal.
    as_text = functools.partial(json.dumps, sort_keys=True)
    if as_text(train.model_dump(mode="json")) == as_text(asked.model_dump(mode="json")):
        return
    said, would = (flat_table(one.model_dump(mode="json")) for one in (train, asked))
    other = [key for key in would if as_text(would[key]) != as_text(said.get(key))]
    raise ProfileRejected(
        f"--set would change the approved profile {approved.path}: "
        + ", ".join(
            f"{f'train.{key}'!r} = {would[key]!r} instead of {said.get(key)!r}"
            for key in other
        ),
        next_step=(
            "Omit --set; or write the value into the profile and approve it: autotune"
            " profile approve."
        ),
    )


def _short(sha256: str) -> str:
    return f"{sha256[:12]}…"


def verify(
    stored: ApprovedProfile,
    data: Path | None,
    host: Host,
    monitor: GpuMonitor,
    read_cuda: Callable[[], str | None],
) -> Verification:
    """Compare a profile with this machine, and with the dataset at ``data``, else in AUTOTUNE_DATA or the profile.

    ``read_cuda`` returns the CUDA version that torch is built for; it is called only if
    a GPU is compared.
    """
    train, made_on, manifest, no_data = (
        stored.profile.train,
        stored.profile.fingerprint,
        None,
        "",
    )
    try:
        manifest = read_manifest(stored.data_dir(data))
    except TrainerError as error:
        no_data = error.message
    on_gpu = made_on.device == "cuda"
    place = stored.data_here(data) or stored.path.parent
    site = open_device(
        "auto" if on_gpu else "cpu", place, host, monitor, measures=False
    )
    missing = [
        name
        for name in ("torch", "transformers")
        if site.versions.setdefault(name, "n/a") == "n/a"
    ]
    # On a CPU the CUDA version that torch was built for does not matter.
    cuda = made_on.cuda if site.device == "cpu" else read_cuda()
    here = fingerprint(site, train.model, manifest, cuda)
    unknown: dict[str, str] = {}
    if elsewhere := on_gpu and site.device == "cpu":
        why = (
            "this is not the profile's machine:"
            f" {site.gpu_absent or 'no GPU is in use'}"
        )
        unknown |= dict.fromkeys(
            (name for name in Fingerprint.model_fields if name not in _TOLD_ANYWHERE),
            why,
        )
    if elsewhere or manifest is None:
        unknown["data_filesystem"] = no_data or "this machine may mount other disks"
    if manifest is None:
        unknown["dataset_hash"] = no_data
    unknown |= dict.fromkeys(missing, "not installed here")
    recorded, present = stored.recorded_sha256 or "n/a", stored.approval.present_sha256
    checks = [
        Check(
            field="content",
            found="same" if stored.intact else "warning",
            profile=recorded,
            here=present,
        )
    ]
    # Fields of [train] that repeat the fingerprint must match it, or the figures are of
    # something else.
    twice: list[tuple[str, str, str]] = [("train.device", made_on.device, train.device)]
    if train.data.dataset_hash is not None:
        twice.append(
            ("train.data.dataset_hash", made_on.dataset_hash, train.data.dataset_hash)
        )
    checks += [
        Check(field=name, found="error", profile=made, here=says)
        for name, made, says in twice
        if made != says
    ]
    return Verification(checks=(*checks, *check_fields(made_on, here, unknown)))
