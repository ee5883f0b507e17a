"""Verdicts on a profile, as text. Names and notes are whatever somebody typed, so they are made inert."""

from collections.abc import Sequence

from autotune.core.review import Review, Standing
from autotune.show.tables import inert, text_table

_SHOWN_DIGITS = 12


def standing_line(standing: Standing) -> str:
    """How a profile stands, on one line."""
    last = standing.review
    if standing.state == "approved" and last is not None:
        edited = ", as edited by hand" if last.as_edited else ""
        return f"approved{edited} by {inert(last.by)} at {inert(last.time_utc)}{_note(last)}"
    if standing.state == "rejected" and last is not None:
        return f"rejected by {inert(last.by)} at {inert(last.time_utc)}{_note(last)}"
    if standing.state == "voided" and last is not None:
        return (
            f"voided: {inert(last.by)} approved {short(last.profile_sha256)} at {inert(last.time_utc)}; the profile "
            f"was edited since, and is {short(standing.present_sha256)} now"
        )
    if last is not None:
        return f"not reviewed (what it said before, {short(last.profile_sha256)}, was rejected by {inert(last.by)})"
    return "not reviewed"


def review_text(name: str, standing: Standing, reviews: Sequence[Review], *, intact: bool) -> str:
    """How a profile stands, and every verdict that was given, newest first."""
    written = "as written" if intact else "edited by hand since it was written"
    lines = [
        f"profile:  {inert(name)}",
        f"content:  {short(standing.present_sha256)}, {written}",
        f"standing: {standing_line(standing)}",
    ]
    if reviews:
        rows = [_cells(review, standing) for review in reversed(reviews)]
        lines += ["", text_table(("time (UTC)", "verdict", "by", "of", "note"), rows)]
    return "\n".join(lines)


def short(sha256: str) -> str:
    """The beginning of a hash, which is enough to tell it from others."""
    return sha256[:_SHOWN_DIGITS]


def _cells(review: Review, standing: Standing) -> list[str | None]:
    mine = review.profile_sha256 == standing.present_sha256
    elsewhere = None not in (review.profile, standing.place) and review.profile != standing.place
    of = f"{short(review.profile_sha256)}{', as it is now' if mine else ''}{f', {review.profile}' if elsewhere else ''}"
    return [review.time_utc, review.verdict, review.by, of, review.note or ""]


def _note(review: Review) -> str:
    return f": {inert(review.note)}" if review.note else ""
