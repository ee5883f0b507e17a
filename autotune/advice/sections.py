"""Advice, the bottleneck of a step, and explanations of settings, as text."""

from collections.abc import Sequence

from autotune.advice.decide.rule import AdviceRule
from autotune.base.interval import Interval
from autotune.base.tables import printable_line, terminal_table
from autotune.base.units import (
    format_percent,
    format_share,
)
from autotune.base.wording import (
    format_bounds,
    format_interval,
    format_ratio,
    format_setting,
)
from autotune.evidence.advice import (
    Advice,
    Bottleneck,
    Cause,
    Gain,
    NotJudged,
    SettingChange,
)
from autotune.evidence.kernels import StepKernels
from autotune.kernels.decide.words import bound_words
from autotune.kernels.sections import kernel_table
from autotune.profiles.explanation_text import figure_text

CAUSE_NAMES: dict[Cause, str] = {
    "compute": "compute",
    "padding": "padding",
    "data loading": "data loading",
    "network": "gradient synchronisation",
    "straggler": "the slowest rank",
    "launch-bound": "CPU-bound kernel launches",
    "memory": "GPU memory bandwidth",
    "optimizer step": "the optimizer step",
}
"""Names of the parts of a step for users, in the order of the report's bars."""


def advice_text(
    advice: Sequence[Advice],
    bottleneck: Bottleneck | None,
    kernels: StepKernels | None = None,
    *,
    not_judged: Sequence[NotJudged] = (),
) -> str:
    """Format the bottleneck and the kernels, then all recommendations in their order.

    Args:
        advice: Recommendations.
        bottleneck: Parts of a step; None if they are not known.
        kernels: Kernels of a step; None if they were not profiled.
        not_judged: Parts of training that could not be judged.
    """
    parts = [] if bottleneck is None else [_bottleneck_text(bottleneck)]
    if kernels is not None:
        parts.append(_kernels_text(kernels))
    for place, one in enumerate(advice, 1):
        details = [] if one.gain is None else [f"gain: {gain_text(one.gain)}"]
        details += [
            *(f"evidence: {figure_text(figure)}" for figure in one.evidence),
            f"cost: {one.cost}",
        ]
        details += [
            f"set: {change_text(change)}{', safe' if one.safe else ''}"
            for change in one.changes
        ]
        details += [] if one.command is None else [f"run: {one.command}"]
        lines = (
            f"   {printable_line(line)}"
            for line in (*details, f"would change this: {one.would_change}")
        )
        claim = printable_line(one.claim)
        heading = f"{place}. [{one.severity}] {claim}  ({one.rule})"
        parts.append("\n".join([heading, *lines]))
    if not_judged:
        parts.append("\n".join(map(not_judged_text, not_judged)))
    return "\n\n".join(parts)


def not_judged_text(one: NotJudged) -> str:
    """Format a part of training that could not be judged, and how to find out."""
    ways = [] if one.command is None else [f"run: {one.command}"]
    ways += [one.remedy] if one.remedy else []
    return printable_line("; ".join([f"not judged: {one.part}: {one.reason}", *ways]))


def bottleneck_sentence(found: Bottleneck | None) -> str:
    """Return a sentence such as ``Bottleneck: data loading, 57 % of the step``.

    It warns if the bottleneck is not certain, or not known.
    """
    if found is None:
        return "Bottleneck: not measured"
    part = found.part(found.limit)
    share = "" if part is None else f", {format_percent(part.share)} of the step"
    return (
        f"Bottleneck{'' if found.decided else ' (not certain)'}:"
        f" {CAUSE_NAMES[found.limit]}{share}"
    )


def _bottleneck_text(found: Bottleneck) -> str:
    """Format the bottleneck, all parts of a step, and causes that are not known."""
    mfu = "" if found.mfu is None else f"; MFU {format_share(found.mfu.value)}"
    rows = [
        [
            CAUSE_NAMES[part.cause],
            format_share(part.share),
            format_bounds(part.low, part.high, format_share),
            part.source,
        ]
        for part in found.parts
        if part.share > 0
    ]
    table = terminal_table(
        ("part of the step", "share", "95 % CI", "measured in"), rows, align="lrrl"
    )
    lines = [f"{bottleneck_sentence(found)}{mfu}", table]
    return "\n".join(
        [*lines, *(f"not measured: {printable_line(one)}" for one in found.untold)]
    )


def _kernels_text(step: StepKernels) -> str:
    """Format the slowest kernels of a step, and its distance from all bounds."""
    table = kernel_table(step)
    rows = terminal_table(table.headers, table.rows, align=table.align)
    return f"{table.caption}\n{rows}\n{bound_words(step)}"


def rules_text(rules: Sequence[AdviceRule]) -> str:
    """Format the table of rules."""
    rows = [
        [rule.name, ", ".join(rule.covers) or None, rule.looks_for] for rule in rules
    ]
    return terminal_table(("rule", "covers", "check"), rows)


def gain_text(gain: Gain | None) -> str:
    """Format the gain that advice is expected to bring."""
    if gain is None:
        return "unknown"
    ratio = Interval.from_bounds(gain.ratio, gain.low, gain.high, gain.confidence)
    return f"{format_interval(ratio, format_ratio)} times the {gain.of}, {gain.known}"


def change_text(change: SettingChange) -> str:
    """Format a changed setting with its old value."""
    name = change.argument or f"train.{change.key}"
    return f"{name} = {format_setting(change.new)} (was {format_setting(change.old)})"
