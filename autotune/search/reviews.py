"""Where verdicts on profiles lie: beside the report, appended to and never taken back."""

import contextlib
import json
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune import __version__
from autotune.core.profile import HASH_KEY, Profile, profile_from_tables
from autotune.core.review import (
    MOST_PATH_CHARACTERS,
    Review,
    ReviewFile,
    Standing,
    Verdict,
    is_sha256,
    present_sha256,
    reviews_from_json,
    standing_of,
)
from autotune.decide.changes import flat_settings
from autotune.decide.physical import check_profile
from autotune.errors import BadInput, ProfileRefused
from autotune.search.profiles import report_directory
from autotune.store import unwritable_means_bad_input, write_atomically
from trainer.config import TrainConfig
from trainer.disk import locked
from trainer.errors import BadConfig
from trainer.events import utc_now
from trainer.resolve import profile_sha256, read_profile_tables
from trainer.schema import parse_table, read_json

REVIEW_FILE = "review.json"
_LOCK_FILE = ".review.lock"
_MOST_BYTES = 4 * 2**20
_SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedProfile:
    """A profile as it is now, and how it stands."""

    path: Path
    profile: Profile
    recorded_sha256: str | None
    """The hash that the file names; None where it names none."""
    file_sha256: str
    """Of all that the file says, that hash among it: runs name the profile by it."""
    standing: Standing
    reviews: tuple[Review, ...]
    """All verdicts that were ever given on a profile of this name, oldest first."""

    @property
    def intact(self) -> bool:
        """Whether its content still has the hash it was written with."""
        return self.recorded_sha256 == self.standing.present_sha256


def read_reviewed(profile: Path, reports: Path) -> ReviewedProfile:
    """Read a profile once, with the verdicts on just that content.

    Raises:
        TrainerError, AutotuneError: If the profile or its reviews cannot be used.
    """
    tables = read_profile_tables(profile)
    present = present_sha256(tables, where=str(profile))
    found, _ = profile_from_tables(tables, where=str(profile))
    check_profile(found)
    recorded = tables.get(HASH_KEY)
    given = read_reviews(review_path(profile, reports))
    return ReviewedProfile(
        path=profile,
        profile=found,
        recorded_sha256=recorded if isinstance(recorded, str) and is_sha256(recorded) else None,
        file_sha256=profile_sha256(tables),
        standing=standing_of(given, present, _place(profile, reports)),
        reviews=tuple(given),
    )


def review_path(profile: Path, reports: Path) -> Path:
    """Where the verdicts on a profile lie."""
    return report_directory(profile, reports) / REVIEW_FILE


def read_reviews(path: Path) -> list[Review]:
    """All verdicts, oldest first; none where nobody gave one.

    Raises:
        BadInput, TrainerError: If the file is damaged, or of another schema version.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", next_step="Get permission to read it.") from error
    return reviews_from_json(read_json(path, max_bytes=_MOST_BYTES), where=str(path))


def review(
    profile: Path, reports: Path, verdict: Verdict, *, by: str, note: str | None, as_edited: bool = False
) -> ReviewedProfile:
    """Add a verdict on what a profile says now.

    Args:
        profile: The profile.
        reports: Where reports lie.
        verdict: What is said of it.
        by: Who says it; taken as it is.
        note: Why.
        as_edited: Approve what it says now even where that is not what was measured.

    Raises:
        ProfileRefused: If it is to be approved and was edited since it was written.
        TrainerError, AutotuneError: If the name, the note, the profile or its reviews cannot be used.
    """
    before = read_reviewed(profile, reports)
    if verdict == "approved" and not before.intact and not as_edited:
        raise ProfileRefused(
            f"{profile} was edited by hand since autotune wrote it ({_written(before)}): its figures were measured for "
            "what it said then, not for what would be approved",
            next_step=f"See why each value is so: autotune profile explain {shlex.quote(str(profile))}. To approve "
            "what it says now: --as-edited; to have it measured: autotune tune.",
        )
    said = {
        "profile_sha256": before.standing.present_sha256,
        "verdict": verdict,
        "by": by.strip(),
        "note": note,
        "time_utc": utc_now(),
        "tool_version": __version__,
        "as_edited": verdict == "approved" and not before.intact,
        "profile": before.standing.place,
    }
    try:
        mine = parse_table(Review, said, where="review")
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error
    path = review_path(profile, reports)
    with _alone(path.parent):
        text = _text([*read_reviews(path), mine])
        if len(text) > _MOST_BYTES:
            raise BadInput(f"{path} is full: {_MOST_BYTES} bytes", next_step="Move it away, and keep it.")
        write_atomically(path, text)
    return read_reviewed(profile, reports)


def require_approved(profile: Path, reports: Path, *, expect_sha256: str | None = None) -> ReviewedProfile:
    """Let only a profile pass whose present content is approved.

    Args:
        profile: The profile.
        reports: Where reports lie.
        expect_sha256: Its ``file_sha256`` when it was approved for what it is wanted for; None takes any approval.

    Raises:
        ProfileRefused: If it is not, with what to do.
    """
    found = read_reviewed(profile, reports)
    standing, last = found.standing, found.standing.review
    review, at = ["autotune", "report", "review", str(profile)], ["--reports", str(reports)]
    approve = shlex.join([*review, "--approve", "--by", "NAME", *at])
    if standing.state == "approved":
        if expect_sha256 not in (None, found.file_sha256):
            raise ProfileRefused(
                f"{profile} is approved as it is now, {_short(found.file_sha256)}…, and this job was written for what "
                f"it said before, {_short(expect_sha256)}…",
                next_step="Write the job again: autotune launch slurm; or undo the change.",
            )
        return found
    if standing.state == "not reviewed" or last is None:
        raise ProfileRefused(
            f"{profile} is not approved: nobody has reviewed what it says now, {_short(standing.present_sha256)}…",
            next_step=f"Have it reviewed: {approve}",
        )
    if standing.state == "rejected":
        raise ProfileRefused(
            f"{profile} was rejected by {last.by!r} at {last.time_utc}",
            next_step=f"Read why: {shlex.join([*review, *at])}",
        )
    raise ProfileRefused(
        f"{profile} is not approved any more: {last.by!r} approved {_short(last.profile_sha256)}… at {last.time_utc}, "
        f"and now it says {_short(standing.present_sha256)}…",
        next_step=f"Undo the change, or have it reviewed again: {approve}",
    )


def refuse_other_settings(approved: ReviewedProfile, asked: TrainConfig) -> None:
    """Let only settings pass that are the approved ones, each of them: which ones are harmless, nobody has said.

    Raises:
        ProfileRefused: If the command line makes one of them something else, with their names.
    """
    train = approved.profile.train
    # As text: Python takes 1, 1.0 and true for the same.
    if _json(train.model_dump(mode="json")) == _json(asked.model_dump(mode="json")):
        return
    said, would = flat_settings(train), flat_settings(asked)
    other = [key for key in would if _json(would[key]) != _json(said.get(key))]
    raise ProfileRefused(
        f"--set makes of {approved.path} what nobody has approved: "
        + ", ".join(f"{f'train.{key}'!r} = {would[key]!r}, and not {said.get(key)!r}" for key in other),
        next_step="Write it into the profile, and have that reviewed: autotune report review; or leave it out.",
    )


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _place(profile: Path, reports: Path) -> str | None:
    """Where a profile lies, seen from where ``reports`` lies: the same from any directory and on any machine."""
    place = os.path.relpath(profile.resolve(), reports.resolve().parent)
    return place if len(place) <= MOST_PATH_CHARACTERS and place.isprintable() else None


def _written(found: ReviewedProfile) -> str:
    present = _short(found.standing.present_sha256)
    if found.recorded_sha256 is None:
        return f"its hash is {present}…, and it names none"
    return f"its hash is {present}…, and it was written with {_short(found.recorded_sha256)}…"


def _short(sha256: str) -> str:
    return sha256[:_SHOWN_DIGITS]


def _text(reviews: list[Review]) -> str:
    """Escaped to ASCII: whoever opens the file sees what a name holds, and no terminal is steered by it."""
    return json.dumps(ReviewFile(reviews=reviews).model_dump(mode="json"), indent=2) + "\n"


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One writer at a time, so that of two verdicts given at once none is lost."""
    with contextlib.ExitStack() as held:
        with unwritable_means_bad_input(directory):
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(directory / _LOCK_FILE, math.inf, needed=False))
        yield
