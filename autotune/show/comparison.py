"""Two profiles, tunings or runs side by side, as text."""

from collections.abc import Sequence

from autotune.core.units import format_bytes, format_count, format_share
from autotune.decide.comparison import Compared, Comparison, Gate, Side
from autotune.decide.statistics import SHOWN_CONFIDENCE
from autotune.show.changes import change_table
from autotune.show.intervals import confidence_words
from autotune.show.tables import inert, text_table

HEADERS = ("figure", "of", "A", "n", "B", "n", "B to A", "95 % interval", "verdict")
ALIGN = "llrrrrrrl"
_MOST_NAMES = 6


def comparison_text(found: Comparison, gate: Gate | None) -> str:
    """The answer first, then what changed, then every figure."""
    parts = [
        "\n".join([f"A: {_side(found.a)}", f"B: {_side(found.b)}"]),
        *([f"verdict: {gate.state}: {gate.words}"] if gate else []),
        _headline(found),
    ]
    for title, changes in (
        ("model, data and place", found.circumstances),
        ("settings", found.settings),
        ("machine and software", found.facts),
    ):
        parts.append(f"{title}\n{change_table(changes)}" if changes else f"{title}: the same")
    if found.figures:
        parts.append(text_table(HEADERS, [compared_cells(one) for one in found.figures], align=ALIGN))
    else:
        parts.append("figures: none that both have")
    parts += [_only(side, names) for side, names in (("A", found.only_a), ("B", found.only_b)) if names]
    parts += [f"{side}: {inert(note)}" for side, one in (("A", found.a), ("B", found.b)) for note in one.notes]
    return "\n\n".join(parts)


def compared_cells(one: Compared) -> list[str | None]:
    """One figure of both sides."""
    low, high = one.change.low, one.change.high
    verdict = f"{one.verdict} ({one.why})" if one.why else one.verdict
    return [
        one.metric.name,
        one.of,
        _figure(one, one.a.value),
        str(one.a.n),
        _figure(one, one.b.value),
        str(one.b.n),
        _change(one, one.change.value),
        None if low is None or high is None else f"{_change(one, low)} to {_change(one, high)}",
        verdict,
    ]


def _side(side: Side) -> str:
    return f"{inert(side.name)} ({side.kind})"


def _headline(found: Comparison) -> str:
    one = found.headline
    if one is None:
        return "training speed: not measured on both sides"
    cells = compared_cells(one)
    interval = "" if cells[7] is None else f" ({cells[7]}, {confidence_words(SHOWN_CONFIDENCE)})"
    told = f"{cells[2]} and {cells[4]} {one.metric.name}, B is {cells[6]} of A{interval}: {cells[8]}"
    return f"training speed by {inert(one.of)}: {told}"


def _only(side: str, names: Sequence[str]) -> str:
    shown = "; ".join(inert(name) for name in names[:_MOST_NAMES])
    return f"only in {side}: {shown}{f'; and {len(names) - _MOST_NAMES} more' if len(names) > _MOST_NAMES else ''}"


def _figure(one: Compared, value: float) -> str:
    unit = one.metric.unit
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        return format_share(value)
    return f"{value:.4f}" if unit == "nats" else format_count(value)


def _change(one: Compared, value: float) -> str:
    """A ratio; of shares on their own scale, points."""
    return f"{100 * value:+.2f} points" if one.a.scale == "linear" and one.metric.unit == "share" else f"{value:.3f}"
