"""What differs between two profiles, as text."""

from collections.abc import Sequence

from autotune.core.review import is_sha256
from autotune.core.units import format_bytes
from autotune.decide.changes import Change, ProfileChanges
from autotune.decide.explain import meaning_of
from autotune.show.review import short
from autotune.show.tables import inert, text_table

_SIDE_CHARACTERS = 40


def changes_text(old: str, new: str, changes: ProfileChanges) -> str:
    """What differs, by table; settings with what they mean.

    Args:
        old: Name of the first profile.
        new: Name of the second.
        changes: What differs.
    """
    parts = [f"A: {inert(old)}\nB: {inert(new)}"]
    if changes.train:
        rows = [[one.key, *sides(one), first_sentence(meaning_of(one.key) or "")] for one in changes.train]
        parts.append("[train]\n" + text_table(("setting", "A", "B", "meaning"), rows))
    else:
        parts.append("[train]: the same settings")
    for name, found in (
        ("constraints", changes.constraints),
        ("fingerprint", changes.fingerprint),
        ("evidence", changes.evidence),
    ):
        parts.append(f"[{name}]\n{change_table(found)}" if found else f"[{name}]: the same")
    return "\n\n".join(parts)


def change_table(changes: Sequence[Change]) -> str:
    """Fields with both values, and the ratio where they are figures."""
    rows = [[one.key, *sides(one), "" if one.ratio is None else f"{one.ratio:.3f}"] for one in changes]
    return text_table(("field", "A", "B", "B / A"), rows, align="lrrr")


def sides(change: Change) -> tuple[str, str]:
    """Both values of a field."""
    return _value(change.key, change.old), _value(change.key, change.new)


def first_sentence(text: str) -> str:
    """What fits a cell."""
    head, stop, _ = text.partition(". ")
    return head + stop.strip()


def _value(key: str, value: object) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return format_bytes(value) if "_bytes" in key else f"{value:,.6g}" if value < 1e6 else f"{value:,.0f}"
    text = str(value)
    if is_sha256(text):
        return short(text)
    return text if len(text) <= _SIDE_CHARACTERS else f"{text[:_SIDE_CHARACTERS]}…"
