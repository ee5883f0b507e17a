"""The verdict on a profile, as text. Names and notes are whatever was typed, so they are made inert."""

from autotune.core.review import Standing
from autotune.show.tables import inert

_SHOWN_DIGITS = 12


def standing_line(standing: Standing) -> str:
    """How a profile stands, on one line."""
    last = standing.review
    if last is None:
        return "not reviewed"
    who, before = f"by {inert(last.by)} at {inert(last.time_utc)}", short(last.profile_sha256)
    if standing.state == "voided":
        now = short(standing.present_sha256)
        return f"voided: {before} was approved {who}; the profile was edited since, and is {now} now"
    if standing.state == "not reviewed":
        return f"not reviewed (what it said before, {before}, was rejected by {inert(last.by)})"
    edited, note = ", as edited by hand" if last.as_edited else "", f": {inert(last.note)}" if last.note else ""
    return f"{standing.state}{edited} {who}{note}"


def review_text(name: str, standing: Standing, *, intact: bool) -> str:
    """How a profile stands."""
    written = "as written" if intact else "edited by hand since it was written"
    return (
        f"profile:  {inert(name)}\ncontent:  {short(standing.present_sha256)}, {written}\n"
        f"standing: {standing_line(standing)}"
    )


def short(sha256: str) -> str:
    """The beginning of a hash, which is enough to tell it from others."""
    return sha256[:_SHOWN_DIGITS]
