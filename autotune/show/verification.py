"""What a profile was held against, as text."""

from autotune.core.review import Standing, is_sha256
from autotune.core.verification import LedgerCheck, Verification
from autotune.show.review import short, standing_line
from autotune.show.tables import text_table

_SIDE_CHARACTERS = 40
_WORDS = {"refuse": "differs: refused", "warn": "differs: mind it", "inform": "differs"}


def verification_text(verification: Verification, standing: Standing, *, intact: bool) -> str:
    """Every check, then how the profile stands with those who review it."""
    rows = [
        [
            check.field,
            _WORDS.get(check.found, check.found),
            _cut(check.profile),
            "" if check.found == "same" else _cut(check.here, whole=check.found == "not checkable here"),
        ]
        for check in verification.checks
    ]
    edited = "as written" if intact else "edited by hand since it was written, so its figures may be of other settings"
    return "\n".join(
        [
            text_table(("what", "result", "in the profile", "here"), rows),
            "",
            f"content: {short(standing.present_sha256)}, {edited}",
            *([] if verification.ledger is None else [f"ledger:  {ledger_words(verification.ledger)}"]),
            f"review:  {standing_line(standing)}",
        ]
    )


def ledger_words(found: LedgerCheck) -> str:
    """What the ledger says of a profile, on one line."""
    if found.found == "no trials":
        others = f": {found.others} trials there are another profile's" if found.others else ""
        return f"not checkable here: no trial of it is in its ledger{others}"
    said = {
        "same": f"matches: the {found.trials} trials it rests on are as they were",
        "differs": "does not match: trials it rests on were changed, lost or put in since, or the profile's hash was",
        "not recomputable": "its hash cannot be recomputed: it was written before profiles said which trials it is of",
    }[found.found]
    said += f"; {found.added} were added since" if found.added else ""
    if found.unfounded:
        return f"{said}; no trial there gave {', '.join(found.unfounded)}"
    return f"{said}; its largest micro-batch and its speeds are those of trials there"


def _cut(text: str, *, whole: bool = False) -> str:
    """Hashes by their beginnings; reasons are left whole."""
    if is_sha256(text):
        return short(text)
    return text if whole or len(text) <= _SIDE_CHARACTERS else f"{text[:_SIDE_CHARACTERS]}…"
