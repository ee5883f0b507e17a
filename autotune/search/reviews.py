"""Read and write the verdict on a profile, which lies beside its report."""

import functools
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from autotune.core.profile import HASH_KEY, present_sha256
from autotune.core.verification import Review, Standing, Verdict, is_sha256, standing_of
from autotune.decide.comparison import flat_table
from autotune.errors import BadInput, ProfileRefused
from autotune.search.profiles import StoredProfile, read_profile, report_directory
from autotune.store import write_atomically
from trainer.config import TrainConfig
from trainer.errors import BadConfig
from trainer.events import utc_now
from trainer.resolve import profile_sha256, read_profile_tables
from trainer.schema import parse_table, read_json

_MOST_BYTES = 2**20
_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedProfile(StoredProfile):
    """A profile as it is now, and how it stands."""

    recorded_sha256: str | None
    """The hash that the file names; None if it names none."""
    file_sha256: str
    """Of all that the file says, that hash among it: runs name the profile by it."""
    standing: Standing


def read_reviewed(profile: Path, reports: Path) -> ReviewedProfile:
    """Read a profile once, with the verdict on just that content.

    Raises:
        TrainerError, AutotuneError: If the profile or its review cannot be used.
    """
    tables = read_profile_tables(profile)
    stored, recorded = read_profile(profile, tables), tables.get(HASH_KEY)
    return ReviewedProfile(
        path=profile,
        profile=stored.profile,
        intact=stored.intact,
        recorded_sha256=recorded if isinstance(recorded, str) and is_sha256(recorded) else None,
        file_sha256=profile_sha256(tables),
        standing=standing_of(_read(review_path(profile, reports)), present_sha256(tables, where=str(profile))),
    )


def review_path(profile: Path, reports: Path) -> Path:
    """Return the path of the verdict on a profile."""
    return report_directory(profile, reports) / "review.json"


def _read(path: Path) -> Review | None:
    """The verdict; None if there is none. A damaged file is never taken for an absent one."""
    if not os.path.lexists(path):
        return None
    try:
        return parse_table(Review, read_json(path, max_bytes=_MOST_BYTES), where=str(path))
    except BadConfig as error:
        next_step = "Restore it from a copy; or move it away, and have the profile reviewed again."
        raise BadInput(error.message, next_step=next_step) from error


def review(
    profile: Path, reports: Path, verdict: Verdict, *, by: str, note: str | None, as_edited: bool = False
) -> ReviewedProfile:
    """Keep a verdict on what a profile says now, in place of the one before.

    With ``as_edited`` it is approved even if it does not say what was measured.

    Raises:
        ProfileRefused: If it is to be approved and was edited since it was written.
        TrainerError, AutotuneError: If the name, the note, the profile or its review cannot be used.
    """
    before = read_reviewed(profile, reports)
    present, recorded = before.standing.present_sha256, before.recorded_sha256
    if verdict == "approved" and not before.intact and not as_edited:
        written = "it names none" if recorded is None else f"it was written with {_short(recorded)}"
        raise ProfileRefused(
            f"{profile} was edited by hand since autotune wrote it (its hash is {_short(present)}, and {written}): its "
            "figures were measured for what it said then, not for what would be approved",
            next_step=f"See why each value is so: autotune profile explain {shlex.quote(str(profile))}. To approve "
            "what it says now: --as-edited; to have it measured: autotune tune.",
        )
    edited = verdict == "approved" and not before.intact
    said = {"verdict": verdict, "by": by.strip(), "note": note, "time_utc": utc_now(), "as_edited": edited}
    try:
        mine = parse_table(Review, {"profile_sha256": present, **said}, where="review")
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error
    # Escaped to ASCII, so that no terminal is steered by looking at the file.
    write_atomically(review_path(profile, reports), json.dumps(mine.model_dump(mode="json"), indent=2) + "\n")
    return read_reviewed(profile, reports)


def require_approved(profile: Path, reports: Path, *, expect_sha256: str | None = None) -> ReviewedProfile:
    """Return a profile whose present content is approved, and still has the ``file_sha256`` that is expected, if any.

    Raises:
        ProfileRefused: If it is not, with what to do.
    """
    found = read_reviewed(profile, reports)
    state, last, now = found.standing.state, found.standing.review, _short(found.standing.present_sha256)
    command, at = shlex.join(["autotune", "report", "review", str(profile)]), shlex.join(["--reports", str(reports)])
    next_step = f"Have it reviewed: {command} --approve --by NAME {at}"
    if state == "approved":
        if expect_sha256 in (None, found.file_sha256):
            return found
        why = f"is approved as it is now, {_short(found.file_sha256)}, and this job was written for what it said "
        why += f"before, {_short(expect_sha256)}"
        next_step = "Write the job again: autotune launch slurm; or undo the change."
    elif state == "not reviewed" or last is None:
        why = f"is not approved: nobody has reviewed what it says now, {now}"
    elif state == "rejected":
        why, next_step = f"was rejected by {last.by!r} at {last.time_utc}", f"Read why: {command} {at}"
    else:
        why = f"is not approved any more: {last.by!r} approved {_short(last.profile_sha256)} at {last.time_utc}, and "
        why += f"now it says {now}"
    raise ProfileRefused(f"{profile} {why}", next_step=next_step)


def refuse_other_settings(approved: ReviewedProfile, asked: TrainConfig) -> None:
    """Let only settings pass that are the approved ones, each of them: which ones are harmless, nobody has said.

    Raises:
        ProfileRefused: If the command line makes one of them something else, with their names.
    """
    train = approved.profile.train
    # As text: Python takes 1, 1.0 and true for the same.
    as_text = functools.partial(json.dumps, sort_keys=True)
    if as_text(train.model_dump(mode="json")) == as_text(asked.model_dump(mode="json")):
        return
    said, would = (flat_table(one.model_dump(mode="json")) for one in (train, asked))
    other = [key for key in would if as_text(would[key]) != as_text(said.get(key))]
    raise ProfileRefused(
        f"--set makes of {approved.path} what nobody has approved: "
        + ", ".join(f"{f'train.{key}'!r} = {would[key]!r}, and not {said.get(key)!r}" for key in other),
        next_step="Write it into the profile, and have that reviewed: autotune report review; or leave it out.",
    )


def _short(sha256: str) -> str:
    return f"{sha256[:_SHOWN_DIGITS]}…"
