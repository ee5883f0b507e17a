"""Explanations of settings, and figures of their evidence, as text."""

from collections.abc import Callable, Sequence

from autotune.base.tables import printable_line, terminal_table
from autotune.base.units import (
    format_bytes,
    format_count,
    format_seconds,
    format_share,
)
from autotune.base.wording import (
    format_bytes_per_s,
    format_interval,
    format_setting,
)
from autotune.evidence.advice import EvidenceFigure
from autotune.profiles.decide.explain import Explanation

_VALUE_CHARACTERS = 40


def figure_text(figure: EvidenceFigure) -> str:
    """Format a figure of the evidence with its interval, count and source."""
    form, unit = (
        _FORMS.get(figure.unit, _count),
        "" if figure.unit in _FORMS else f" {figure.unit}",
    )
    count = "" if figure.n is None else f", n = {figure.n:,}"
    asked = figure.known == "assumed" and figure.source == "constraints"
    known = (
        ""
        if figure.known == "measured"
        else f", {'as requested' if asked else figure.known}"
    )
    return (
        f"{figure.name}: {format_interval(figure, form)}{unit}{count}{known}"
        f" [{figure.source}]"
    )


def explanations_text(found: Sequence[Explanation]) -> str:
    """Format all settings: decided ones with their reasons, defaults by name."""
    rows = [
        [one.key, _short(one.value), one.origin, one.because]
        for one in found
        if one.origin != "default"
    ]
    defaults = [
        f"{one.key} = {_short(one.value)}" for one in found if one.origin == "default"
    ]
    parts = (
        [terminal_table(("setting", "value", "origin", "reason"), rows)] if rows else []
    )
    parts += [f"defaults: {printable_line(', '.join(defaults))}"] if defaults else []
    return "\n\n".join(parts)


def explanation_text(one: Explanation) -> str:
    """Format a setting's meaning, its evidence, and the rejected alternatives."""
    lines = [f"{one.key} = {_short(one.value)}"]
    parts = {
        "meaning": (one.meaning,) if one.meaning else (),
        "origin": (f"{one.origin}: {one.because}",),
        "evidence": tuple(figure_text(figure) for figure in one.evidence),
        "rejected": one.rejected,
    }
    for name, entries in parts.items():
        lines += [
            f"  {'' if number else name:<8}  {printable_line(entry)}"
            for number, entry in enumerate(entries)
        ]
    return "\n".join(lines)


def _short(value: object) -> str:
    text = format_setting(value)
    return printable_line(
        text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"
    )


def _count(value: float) -> str:
    return format_count(
        value, digits=0 if value >= 1000 or float(value).is_integer() else 1
    )


_FORMS: dict[str, Callable[[float], str]] = {
    "share": format_share,
    "ratio": "{:.3f}".format,
    "bytes": format_bytes,
    "bytes/s": format_bytes_per_s,
    "s": format_seconds,
    "FLOP/s": lambda value: f"{value / 1e12:,.0f} TFLOP/s",
    "count": _count,
}
