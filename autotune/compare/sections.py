"""Two profiles, tunings, runs or datasets side by side, as text."""

import re
from collections.abc import Callable, Iterator, Sequence

from autotune.base.interval import SHOWN_CONFIDENCE
from autotune.base.tables import printable_line, terminal_table
from autotune.base.units import format_bytes, format_count, format_share
from autotune.base.wording import format_bounds, format_confidence
from autotune.compare.decide import Change, Compared, Comparison, Gate, Side
from autotune.profiles.decide.explain import meaning_of
from autotune.profiles.review_text import short_value

_HEADERS = ("figure", "of", "A", "n", "B", "n", "B to A", "95 % interval", "verdict")
_MOST_NAMES = 6
"""Number of figures of one side only that are named."""
_WITHOUT_VERDICT = ("not judged", "not comparable")
"""Verdicts that come before the figures, which they qualify."""


def comparison_text(comparison: Comparison, gate: Gate | None) -> str:
    """Format a comparison: verdict, changes, settings with their meaning, figures."""
    names = [
        f"{letter}: {printable_line(side.name)} ({side.kind})"
        for letter, side in (("A", comparison.a), ("B", comparison.b))
    ]
    parts = ["\n".join(names)]
    if gate is not None:
        parts.append(f"verdict: {gate.state}: {gate.words}")
    # Datasets have no speed.
    if "dataset" not in (comparison.a.kind, comparison.b.kind):
        parts.append(_headline(comparison.headline))
    parts += [
        _changes("model, data and machine", comparison.circumstances),
        _changes("settings", comparison.settings, with_meaning=True),
        _changes("machine and software", comparison.facts),
    ]
    if comparison.figures:
        figures = [_figure_cells(figure) for figure in comparison.figures]
        parts.append(terminal_table(_HEADERS, figures, align="llrrrrrrl"))
    else:
        parts.append("figures: none in common")
    parts += _one_sided("A", comparison.a, comparison.only_a)
    parts += _one_sided("B", comparison.b, comparison.only_b)
    return "\n\n".join(parts)


def _changes(
    title: str, changes: Sequence[Change], *, with_meaning: bool = False
) -> str:
    """Return the table of changed fields, perhaps with the meaning of settings."""
    if not changes:
        return f"{title}: the same"
    headers = ["field", "A", "B", "B / A"]
    if with_meaning:
        headers.append("meaning")
    rows = [
        _change_cells(change, meaning_of(change.key) or "")[: len(headers)]
        for change in changes
    ]
    return f"{title}\n{terminal_table(headers, rows, align='lrrrl')}"


def _one_sided(letter: str, side: Side, names: Sequence[str]) -> Iterator[str]:
    """Yield the figures that only one side has, and the notes on it."""
    if names:
        shown = "; ".join(printable_line(name) for name in names[:_MOST_NAMES])
        if len(names) > _MOST_NAMES:
            shown += f"; and {len(names) - _MOST_NAMES} more"
        yield f"only in {letter}: {shown}"
    for note in side.notes:
        yield f"{letter}: {printable_line(note)}"


def _headline(figure: Compared | None) -> str:
    """Return the training speeds of both sides, and the verdict on them."""
    if figure is None:
        return "training speed: not measured on both sides"
    condition = f"training speed ({printable_line(figure.of)})"
    speed_a = _value_of(figure, figure.a.value)
    speed_b = _value_of(figure, figure.b.value)
    if figure.metric_of_b is None:
        change = f"B is {_change_of(figure, figure.change.value)} of A"
        bounds = _change_bounds(figure)
        if bounds is not None:
            change += f" ({bounds}, {format_confidence(SHOWN_CONFIDENCE)})"
        speeds = f"{condition}: {speed_a} and {speed_b} {figure.metric.name}, {change}"
    else:
        speeds = (
            f"{condition}: {speed_a} {figure.metric.name} and {speed_b}"
            f" {figure.metric_of_b.name}"
        )
    verdict = _verdict(figure)
    if figure.verdict in _WITHOUT_VERDICT:
        return f"{verdict}: {speeds}"
    return f"{speeds}: {verdict}"


def _figure_cells(figure: Compared) -> list[str | None]:
    return [
        figure.metric.name,
        figure.of,
        _value_of(figure, figure.a.value),
        str(figure.a.n),
        _value_of(figure, figure.b.value),
        str(figure.b.n),
        _change_of(figure, figure.change.value),
        _change_bounds(figure),
        _verdict(figure),
    ]


def _value_of(figure: Compared, value: float) -> str:
    """Format a value in the unit of its figure."""
    formats: dict[str, Callable[[float], str]] = {
        "bytes": format_bytes,
        "share": format_share,
        "nats": "{:.4f}".format,
    }
    form = formats.get(figure.metric.unit, format_count)
    return form(value)


def _change_of(figure: Compared, change: float) -> str:
    """Format a ratio; for shares on a linear scale, a difference in points."""
    if figure.a.scale == "linear" and figure.metric.unit == "share":
        return f"{100 * change:+.2f} points"
    return f"{change:.3f}"


def _change_bounds(figure: Compared) -> str | None:
    return format_bounds(
        figure.change.low,
        figure.change.high,
        lambda change: _change_of(figure, change),
    )


def _verdict(figure: Compared) -> str:
    return f"{figure.verdict} ({figure.why})" if figure.why else figure.verdict


def _change_cells(change: Change, meaning: str) -> list[str | None]:
    # "et al." ends no sentence.
    first_sentence = re.split(r"(?<!\bal\.)(?<=\.) ", meaning, maxsplit=1)[0]
    return [
        change.key,
        _setting_text(change.key, change.old),
        _setting_text(change.key, change.new),
        "" if change.ratio is None else f"{change.ratio:.3f}",
        first_sentence,
    ]


def _setting_text(key: str, value: object) -> str:
    """Format the value of a field; a size in bytes is known by its key."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        return short_value(str(value))
    if "_bytes" in key:
        return format_bytes(value)
    if value < 1e6:
        return f"{value:,.6g}"
    return f"{value:,.0f}"
