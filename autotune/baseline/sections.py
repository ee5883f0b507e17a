"""Report sections on the speedup over other recipes, and on the cost of tuning."""

from collections.abc import Iterator
from pathlib import Path

from autotune.base import document as doc
from autotune.base.render import console_text
from autotune.base.statistics import estimate_windows as interval_of_windows
from autotune.base.units import format_seconds, format_share
from autotune.base.wording import (
    format_number,
    format_ratio,
    format_setting,
    format_window_bounds,
    format_windows,
    plural,
)
from autotune.baseline.values import BaselineEvidence, SettingDifference
from autotune.profiles.decide.follow_up import command, probe_first
from autotune.report.values import ReportedProfile


def baseline_text(found: BaselineEvidence, profile: Path) -> str:
    """Return the comparison and the next command, for the console."""
    following = (("profile", (str(profile),)), ("next", (command("report", profile),)))
    return console_text((*_compared(found), doc.Pairs(pairs=following)))


def baseline_section(one: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the comparison with both baselines, or the command that measures it."""
    found = one.profile.evidence.baseline
    if found is None:
        commands = (
            *probe_first(one.profile, one.path),
            f"autotune baseline {one.quoted}",
        )
        return (doc.Missing(subject="Speedup over the baselines", commands=commands),)
    return _compared(found)


def gains(found: BaselineEvidence) -> Iterator[str]:
    """Yield the speedup of the tuned settings over each baseline, one line each."""
    for row in (one for one in found.rows if one.name != "tuned"):
        ratio = row.bounded_speedup
        speedup = (
            f"n/a ({row.outcome})"
            if ratio is None
            else f"{format_windows(ratio, format_ratio)} times as fast"
        )
        yield f"tuned vs {row.name}: {speedup}"


def _compared(found: BaselineEvidence) -> tuple[doc.Block, ...]:
    rates = [
        interval_of_windows(row.tokens_per_s).interval() if row.tokens_per_s else None
        for row in found.rows
    ]
    speedups = (
        None if row.name == "tuned" else row.bounded_speedup for row in found.rows
    )
    rows = list(zip(found.rows, rates, speedups, strict=True))
    table = doc.table_of(
        "Data table",
        rows,
        ("settings", "l", lambda one: one[0].name),
        ("tokens/s", "r", lambda one: format_number(one[1].value) if one[1] else None),
        (
            "95 % CI",
            "r",
            lambda one: format_window_bounds(one[1], format_number) if one[1] else None,
        ),
        (
            "speedup of tuned",
            "r",
            lambda one: format_ratio(one[2].value) if one[2] else None,
        ),
        (
            "95 % CI",
            "r",
            lambda one: format_window_bounds(one[2], format_ratio) if one[2] else None,
        ),
        ("data wait", "r", lambda one: format_share(one[0].data_wait_share)),
        ("windows", "r", lambda one: str(len(one[0].tokens_per_s))),
        ("outcome", "l", lambda one: one[0].outcome),
    )
    known = [
        (row.name, rate)
        for row, rate, _ in rows
        if rate is not None and rate.low is not None
    ]
    bars = [
        doc.Bar(
            label=name,
            value=it.value,
            low=it.low,
            high=it.high,
            value_text=format_number(it.value),
        )
        for name, it in known
    ]
    shown: doc.Block = table
    if bars:
        said = ", ".join(f"{bar.label} {bar.value_text}" for bar in bars)
        shown = doc.Chart(
            title="Non-padding tokens/s before and after tuning",
            description=f"Non-padding tokens/s: {said}. Thin bars: 95 % CI.",
            drawing=doc.BarChart(
                axis=doc.Axis(label="non-padding tokens/s", unit="count"),
                bars=tuple(bars),
            ),
            table=table,
        )
    how = (
        f"{plural(found.windows, 'interleaved window')} of at least"
        f" {format_seconds(found.window_s)} on {plural(found.local_ranks, 'rank')},"
        f" {format_seconds(found.seconds)} in total; speedups compare windows of the"
        " same round. tokens/s excludes padding. Model, data, sequence length and"
        " global batch are the same."
    )
    differences: tuple[doc.Words, ...] = tuple(
        (
            doc.Strong(text=row.name),
            f": {'; '.join(map(_difference, row.differences)) or 'same as tuned'}",
        )
        for row in found.rows
        if row.name != "tuned"
    )
    return (
        doc.bulleted(gains(found)),
        shown,
        doc.Paragraph(words=(how,)),
        doc.Bullets(items=differences),
    )


def _difference(one: SettingDifference) -> str:
    instead = (
        "" if one.theirs == one.tuned else f" instead of {format_setting(one.tuned)}"
    )
    return f"{one.key}: {format_setting(one.theirs)}{instead}" + (
        "" if one.reason is None else f" ({one.reason})"
    )
