"""Text and report blocks on a profile's verification and approval."""

from autotune.base.document import Block, Missing, Pairs, Table
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.wording import plural
from autotune.evidence.profile import is_sha256
from autotune.profiles.approval_record import Approval, short_hash
from autotune.profiles.checks import Check, TrialLogCheck, Verification
from autotune.profiles.reported_profile import ReportedProfile

_MOST_CHARACTERS = 40
"""Longest value of a check, in characters, so that a row fits a terminal; a longer one
is cut."""
_RESULT_WORDS = {
    "error": "differs (error)",
    "warning": "differs (warning)",
    "info": "differs (info)",
}
"""Words for the results of a check; other results are shown as they are."""


def content_state(*, intact: bool) -> str:
    """Return whether a profile was edited since it was written, in words."""
    return "unmodified" if intact else "modified since it was written"


def verification_text(
    verification: Verification,
    trial_log: TrialLogCheck,
    approval: Approval,
    *,
    intact: bool,
) -> str:
    """Return every check, and the state of the content, trial log and approval."""
    table = Table(
        caption="",
        headers=("field", "result", "in the profile", "here"),
        rows=tuple(_check_cells(check) for check in verification.checks),
    )
    content = _content_words(approval, intact=intact)
    if not intact:
        content += ", so its figures may not hold for its settings"
    pairs = (
        ("content", (content,)),
        ("trial log", (trial_log_words(trial_log),)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((table, Pairs(pairs=pairs)))


def _check_cells(check: Check) -> Row:
    """Return a check as a row; a value that is the same is shown once."""
    here = short_value(check.here)
    if check.found == "same":
        here = ""
    elif check.found in ("unknown", "not compared") and not is_sha256(check.here):
        # The reason why the field cannot be checked, which is shown in full.
        here = check.here
    result = _RESULT_WORDS.get(check.found, check.found)
    return [check.field, result, short_value(check.profile), here]


def trial_log_words(check: TrialLogCheck) -> str:
    """Return the result of a trial log check on one line."""
    if check.found == "no trials":
        words = "unknown: the trial log holds no trial of this profile"
        if check.others:
            words += f"; of another profile: {plural(check.others, 'trial')}"
        return words
    if check.found == "same":
        words = f"the hash of {plural(check.trials, 'trial')} matches"
    elif check.found == "differs":
        words = (
            "the hash does not match: trials or the hash were changed, removed or added"
        )
    else:
        words = "the hash cannot be recomputed: the profile is of an older version"
    if check.added:
        words += f"; added later: {plural(check.added, 'trial')}"
    if check.unfounded:
        return f"{words}; no trial matches {', '.join(check.unfounded)}"
    return f"{words}; the largest micro-batch and all rates match trials"


def short_value(text: str) -> str:
    """Shorten a hash or a long text."""
    if is_sha256(text):
        return short_hash(text)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}…"


def approval_line(approval: Approval) -> str:
    """Return a profile's approval on one line."""
    review = approval.review
    if review is None:
        return "not reviewed"
    reviewer = f"by {review.by} at {review.time_utc}"
    reviewed_hash = short_hash(review.profile_sha256)
    if approval.state == "voided":
        present_hash = short_hash(approval.present_sha256)
        return (
            f"voided: approved {reviewer}, modified since"
            f" (hash {reviewed_hash} then, {present_hash} now)"
        )
    if approval.state == "not reviewed":
        return (
            f"not reviewed (its earlier content, {reviewed_hash}, was rejected by"
            f" {review.by})"
        )
    edited = " (modified content)" if review.as_edited else ""
    note = f": {review.note}" if review.note else ""
    return f"{approval.state}{edited} {reviewer}{note}"


def _content_words(approval: Approval, *, intact: bool) -> str:
    """Return the hash of a profile's present content, and whether it was edited."""
    return f"{short_hash(approval.present_sha256)}, {content_state(intact=intact)}"


def review_text(name: str, approval: Approval, *, intact: bool) -> str:
    """Return a profile's name, content hash and approval."""
    pairs = (
        ("profile", (name,)),
        ("content", (_content_words(approval, intact=intact),)),
        ("approval", (approval_line(approval),)),
    )
    return console_text((Pairs(pairs=pairs),))


def approval_blocks(reported: ReportedProfile) -> tuple[Block, ...]:
    """Return a profile's approval; without a review, the command that approves it."""
    approval = reported.approval
    if approval is None or approval.state == "not reviewed":
        command = f"autotune profile approve {reported.quoted} --by NAME"
        missing = Missing(subject="Approval", state="not reviewed", commands=(command,))
        return (missing,)
    return (Pairs(pairs=(("Approval", (approval_line(approval),)),)),)
