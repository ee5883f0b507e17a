"""Two profiles, tunings, runs or datasets side by side, as text."""

import re

from autotune.base.interval import SHOWN_CONFIDENCE
from autotune.base.tables import printable_line, terminal_table
from autotune.base.units import format_bytes, format_count, format_share
from autotune.base.wording import format_bounds, format_confidence
from autotune.compare.decide import Change, Compared, Comparison, Gate
from autotune.profiles.decide.explain import meaning_of
from autotune.profiles.review_text import short_value

_HEADERS = ("figure", "of", "A", "n", "B", "n", "B to A", "95 % interval", "verdict")
_MOST_NAMES = 6
_WITHOUT_VERDICT = ("not judged", "not comparable")
"""Verdicts that come before the figures, which they qualify."""


def comparison_text(found: Comparison, gate: Gate | None) -> str:
    """Format a comparison: verdict, changes, settings with their meaning, figures."""
    both = (("A", found.a, found.only_a), ("B", found.b, found.only_b))
    parts = [
        "\n".join(
            f"{letter}: {printable_line(side.name)} ({side.kind})"
            for letter, side, _ in both
        ),
        *([f"verdict: {gate.state}: {gate.words}"] if gate else []),
        *(
            [_headline(found.headline)]
            if "dataset" not in (found.a.kind, found.b.kind)
            else []
        ),
    ]
    for title, changes in (
        ("model, data and machine", found.circumstances),
        ("settings", found.settings),
        ("machine and software", found.facts),
    ):
        headers = [
            "field",
            "A",
            "B",
            "B / A",
            *(["meaning"] if title == "settings" else []),
        ]
        rows = [
            _change_cells(one, meaning_of(one.key) or "")[: len(headers)]
            for one in changes
        ]
        parts.append(
            f"{title}\n{terminal_table(headers, rows, align='lrrrl')}"
            if changes
            else f"{title}: the same"
        )
    figures = [_figure_cells(one) for one in found.figures]
    parts.append(
        terminal_table(_HEADERS, figures, align="llrrrrrrl")
        if figures
        else "figures: none in common"
    )
    for letter, side, only in both:
        if only:
            more = (
                f"; and {len(only) - _MOST_NAMES} more"
                if len(only) > _MOST_NAMES
                else ""
            )
            names = "; ".join(printable_line(name) for name in only[:_MOST_NAMES])
            parts.append(f"only in {letter}: {names}{more}")
        parts += [f"{letter}: {printable_line(note)}" for note in side.notes]
    return "\n\n".join(parts)


def _headline(one: Compared | None) -> str:
    if one is None:
        return "training speed: not measured on both sides"
    _, _, a, _, b, _, change, between, verdict = _figure_cells(one)
    interval = (
        ""
        if between is None
        else f" ({between}, {format_confidence(SHOWN_CONFIDENCE)})"
    )
    speeds = (
        f"training speed ({printable_line(one.of)}): {a} and {b} {one.metric.name},"
        f" B is {change} of A{interval}"
    )
    if one.metric_of_b is not None:
        speeds = (
            f"training speed ({printable_line(one.of)}): {a} {one.metric.name} and {b}"
            f" {one.metric_of_b.name}"
        )
    if one.verdict in _WITHOUT_VERDICT:
        return f"{verdict}: {speeds}"
    return f"{speeds}: {verdict}"


def _figure_cells(one: Compared) -> list[str | None]:
    return [
        one.metric.name,
        one.of,
        _figure(one, one.a.value),
        str(one.a.n),
        _figure(one, one.b.value),
        str(one.b.n),
        _ratio(one, one.change.value),
        format_bounds(one.change.low, one.change.high, lambda end: _ratio(one, end)),
        f"{one.verdict} ({one.why})" if one.why else one.verdict,
    ]


def _figure(one: Compared, value: float) -> str:
    form = {"bytes": format_bytes, "share": format_share, "nats": "{:.4f}".format}.get(
        one.metric.unit, format_count
    )
    return form(value)


def _ratio(one: Compared, value: float) -> str:
    """Format a ratio; for shares on a linear scale, a difference in points."""
    return (
        f"{100 * value:+.2f} points"
        if one.a.scale == "linear" and one.metric.unit == "share"
        else f"{value:.3f}"
    )


def _change_cells(one: Change, meaning: str) -> list[str | None]:
    # "et al." ends no sentence.
    first_sentence = re.split(r"(?<!\bal\.)(?<=\.) ", meaning, maxsplit=1)[0]
    ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
    return [
        one.key,
        _value(one.key, one.old),
        _value(one.key, one.new),
        ratio,
        first_sentence,
    ]


def _value(key: str, value: object) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return (
            format_bytes(value)
            if "_bytes" in key
            else f"{value:,.6g}"
            if value < 1e6
            else f"{value:,.0f}"
        )
    return short_value(str(value))
