"""Why the settings of a profile are what they are, as text."""

from collections.abc import Sequence

from autotune.core.advice import Figure
from autotune.core.units import format_bytes, format_count, format_share
from autotune.decide.explain import Explanation
from autotune.show.intervals import with_bounds
from autotune.show.tables import inert, text_table

_VALUE_CHARACTERS = 40


def explanations_text(found: Sequence[Explanation]) -> str:
    """All settings: those that somebody or something decided with their reasons, the others by name."""
    decided = [one for one in found if one.origin != "default"]
    rows = [[one.key, _value(one.value), one.origin, one.because] for one in decided]
    defaults = [f"{one.key} = {_value(one.value)}" for one in found if one.origin == "default"]
    parts = [text_table(("setting", "value", "origin", "because"), rows)] if rows else []
    if defaults:
        parts.append(f"at the trainer's default: {inert(', '.join(defaults))}")
    return "\n\n".join(parts)


def explanation_text(one: Explanation) -> str:
    """One setting with its meaning, the figures behind it, and what was rejected."""
    lines = [f"{one.key} = {_value(one.value)}", f"  origin    {one.origin}: {inert(one.because)}"]
    if one.meaning:
        lines.insert(1, f"  meaning   {inert(one.meaning)}")
    for number, figure in enumerate(one.evidence):
        lines.append(f"  {'evidence' if number == 0 else '':<8}  {inert(figure_text(figure))}")
    for number, what in enumerate(one.rejected):
        lines.append(f"  {'rejected' if number == 0 else '':<8}  {inert(what)}")
    return "\n".join(lines)


def figure_text(figure: Figure) -> str:
    """A figure with its interval, its count, and where it comes from."""
    told = with_bounds(figure.value, figure.low, figure.high, lambda one: _figure(figure, one), figure.confidence)
    count = "" if figure.n is None else f", n = {figure.n}"
    asked = figure.known == "assumed" and figure.source == "constraints"
    known = "" if figure.known == "measured" else f", {'as asked for' if asked else figure.known}"
    return f"{figure.name}: {told}{count}{known} [{figure.source}]"


def _figure(figure: Figure, value: float) -> str:
    if figure.unit == "bytes":
        return format_bytes(value)
    if figure.unit == "share":
        return format_share(value)
    if figure.unit == "ratio":
        return f"{value:.3f}"
    whole = value >= 1000 or float(value).is_integer()
    return format_count(value, digits=0 if whole else 1)


def _value(value: object) -> str:
    text = "n/a" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return inert(text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…")
