"""Advice and what limits a step, as text and as JSON."""

from collections.abc import Iterator, Sequence

from autotune.core.advice import Advice, Change, Figure, Gain
from autotune.core.bottleneck import Bottleneck, Part
from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.decide.advice import Rule
from autotune.show.intervals import told_bounds, with_bounds
from autotune.show.tables import inert, text_table

PART_HEADERS = ("part of the step", "share", "95 % interval", "read from")
PART_ALIGN = "lrrl"


def advice_text(advice: Sequence[Advice], limit: Bottleneck | None) -> str:
    """What limits, then every recommendation, the largest expected gain first."""
    parts = [] if limit is None else [_limit_text(limit)]
    parts += [_one(number, advice_) for number, advice_ in enumerate(advice, 1)]
    return "\n\n".join(parts)


def rules_text(rules: Sequence[Rule]) -> str:
    """What is looked for."""
    rows = [[rule.name, ", ".join(rule.covers) or None, rule.looks_for] for rule in rules]
    return text_table(("rule", "covers", "looks for"), rows)


def limit_line(limit: Bottleneck) -> str:
    """What limits, in one line."""
    part = limit.part(limit.limit)
    share = "" if part is None else f": {_share_with_bounds(part)} of the step"
    sure = "" if limit.decided else " (not certain: others are as near)"
    mfu = "" if limit.mfu is None else f"; MFU {format_share(limit.mfu.value)}"
    return f"limited by {limit.limit}{share}{sure}{mfu}"


def part_cells(part: Part) -> list[str | None]:
    """One part of a step."""
    return [part.cause, format_share(part.share), _bounds(part), part.source]


def gain_text(gain: Gain | None) -> str:
    """What following advice is expected to bring."""
    if gain is None:
        return "none that can be said"
    ratio = with_bounds(gain.ratio, gain.low, gain.high, "{:.2f}".format, gain.confidence)
    return f"{ratio} times the {gain.of}, {gain.known}"


def figure_text(figure: Figure) -> str:
    """One figure of the evidence, with bounds, readings and source."""
    value = _shown(figure.value, figure.unit)
    told = []
    between = told_bounds(figure.low, figure.high, lambda end: _shown(end, figure.unit), figure.confidence)
    if between is not None:
        told.append(between)
    if figure.n is not None:
        told.append(f"n {figure.n:,}")
    if figure.known != "measured":
        told.append(figure.known)
    told.append(figure.source)
    return f"{figure.name} {value} ({'; '.join(told)})"


def change_text(change: Change) -> str:
    """One setting."""
    return f"train.{change.key} = {_value(change.new)} (was {_value(change.old)})"


def _limit_text(limit: Bottleneck) -> str:
    rows = [part_cells(part) for part in limit.parts if part.share > 0]
    lines = [limit_line(limit), text_table(PART_HEADERS, rows, align=PART_ALIGN)]
    lines += [f"not told: {inert(one)}" for one in limit.untold]
    return "\n".join(lines)


def _one(number: int, advice: Advice) -> str:
    lines = [f"{number}. [{advice.severity}] {inert(advice.claim)}  ({advice.rule})"]
    lines += [f"   {line}" for line in _details(advice)]
    return "\n".join(lines)


def _details(advice: Advice) -> Iterator[str]:
    if advice.gain is not None:
        yield f"gain: {gain_text(advice.gain)}"
    yield from (f"evidence: {inert(figure_text(figure))}" for figure in advice.evidence)
    yield f"cost: {inert(advice.cost)}"
    yield from (f"set: {inert(change_text(change))}{', safe' if advice.safe else ''}" for change in advice.changes)
    if advice.command is not None:
        yield f"do: {inert(advice.command)}"
    yield f"would change this: {inert(advice.would_change)}"


def _share_with_bounds(part: Part) -> str:
    bounds = _bounds(part)
    return format_share(part.share) if bounds is None else f"{format_share(part.share)} ({bounds})"


def _bounds(part: Part) -> str | None:
    if part.low is None or part.high is None:
        return None
    return f"{format_share(part.low)} to {format_share(part.high)}"


def _shown(value: float, unit: str) -> str:
    match unit:
        case "share":
            return format_share(value)
        case "bytes":
            return format_bytes(value)
        case "bytes/s":
            return f"{format_bytes(value)}/s"
        case "s":
            return format_seconds(value)
        case "FLOP/s":
            return f"{value / 1e12:,.0f} TFLOP/s"
        case "ratio":
            return f"{value:,.3g}"
        case "count":
            return format_count(value)
        case _:
            return f"{format_count(value)} {unit}"


def _value(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
