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

_MAX_VALUE_CHARACTERS = 40
"""Length after which a value is cut."""


def figure_text(figure: EvidenceFigure) -> str:
    """Format a figure of the evidence with its interval, count and source."""
    text = format_interval(figure, _FORMS.get(figure.unit, _format_count))
    # The other forms show their unit.
    if figure.unit not in _FORMS:
        text += f" {figure.unit}"
    if figure.n is not None:
        text += f", n = {figure.n:,}"
    if figure.known == "assumed" and figure.source == "constraints":
        text += ", as requested"
    elif figure.known != "measured":
        text += f", {figure.known}"
    return f"{figure.name}: {text} [{figure.source}]"


def explanations_text(explanations: Sequence[Explanation]) -> str:
    """Format all settings: decided ones with their reasons, defaults by name."""
    rows = []
    defaults = []
    for setting in explanations:
        value = _short_value(setting.value)
        if setting.origin == "default":
            defaults.append(f"{setting.key} = {value}")
        else:
            rows.append([setting.key, value, setting.origin, setting.because])
    parts = []
    if rows:
        parts.append(terminal_table(("setting", "value", "origin", "reason"), rows))
    if defaults:
        parts.append(f"defaults: {printable_line(', '.join(defaults))}")
    return "\n\n".join(parts)


def explanation_text(setting: Explanation) -> str:
    """Format a setting's meaning, its evidence, and the rejected alternatives."""
    lines = [f"{setting.key} = {_short_value(setting.value)}"]
    entries_by_name: dict[str, Sequence[str]] = {
        "meaning": [setting.meaning] if setting.meaning else [],
        "origin": [f"{setting.origin}: {setting.because}"],
        "evidence": [figure_text(figure) for figure in setting.evidence],
        "rejected": setting.rejected,
    }
    for name, entries in entries_by_name.items():
        # Only the first of several entries has the name in front of it.
        label = name
        for entry in entries:
            lines.append(f"  {label:<8}  {printable_line(entry)}")
            label = ""
    return "\n".join(lines)


def _short_value(value: object) -> str:
    """Return a value on one line, cut if it is long."""
    text = format_setting(value)
    if len(text) > _MAX_VALUE_CHARACTERS:
        text = f"{text[:_MAX_VALUE_CHARACTERS]}…"
    return printable_line(text)


def _format_count(value: float) -> str:
    """Return a count, with one decimal if it is small and not whole."""
    is_whole = value >= 1000 or float(value).is_integer()
    return format_count(value, digits=0 if is_whole else 1)


_FORMS: dict[str, Callable[[float], str]] = {
    "share": format_share,
    "ratio": "{:.3f}".format,
    "bytes": format_bytes,
    "bytes/s": format_bytes_per_s,
    "s": format_seconds,
    "FLOP/s": lambda value: f"{value / 1e12:,.0f} TFLOP/s",
    "count": _format_count,
}
"""Function that formats a figure with its unit; figures of other units are counts."""
