"""Sections on the speedup over untuned settings and other subjects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.base import document as doc
from autotune.base.interval import Interval
from autotune.base.render_console import console_text
from autotune.base.units import format_seconds, format_share
from autotune.base.window_statistics import estimate_windows
from autotune.base.wording import (
    format_number,
    format_ratio,
    format_setting,
    format_window_bounds,
    format_windows,
    plural,
)
from autotune.evidence.baseline import (
    TUNED,
    BaselineEvidence,
    BaselineRow,
    SettingDifference,
)
from autotune.profiles.decide.follow_up import command, missing_probe_commands
from autotune.profiles.reported_profile import ReportedProfile


def baseline_text(baseline: BaselineEvidence, profile: Path) -> str:
    """Return the comparison and the next command, for the console."""
    pairs = (("profile", (str(profile),)), ("next", (command("report", profile),)))
    return console_text((*_comparison(baseline), doc.Pairs(pairs=pairs)))


def comparison_text(baseline: BaselineEvidence) -> str:
    """Return a comparison with other profiles, for the console."""
    pairs = (
        ("written", ("nothing: the result depends on the other profiles",)),
        ("next", ("train with the faster one: autotune train PROFILE",)),
    )
    return console_text((*_comparison(baseline), doc.Pairs(pairs=pairs)))


def baseline_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the comparison with untuned settings, or the command that measures it."""
    baseline = reported.profile.evidence.baseline
    if baseline is None:
        commands = (
            *missing_probe_commands(reported.profile, reported.path),
            f"autotune baseline {reported.quoted}",
        )
        return (
            doc.Missing(subject="Speedup over untuned settings", commands=commands),
        )
    return _comparison(baseline)


def gains(baseline: BaselineEvidence) -> list[str]:
    """Return a line for each baseline, with the speedup of the tuned settings."""
    lines = []
    for row in baseline.rows:
        if row.name == TUNED:
            continue
        speedup = row.bounded_speedup
        if speedup is None:
            gain = f"n/a ({row.outcome})"
        else:
            gain = f"{format_windows(speedup, format_ratio)} times as fast"
        lines.append(f"tuned vs {row.words}: {gain}")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableRow:
    """A row in the table and the chart."""

    row: BaselineRow
    rate: Interval | None
    """Units/s; None if the subject did not run."""
    speedup: Interval | None
    """Speedup of the tuned settings; None for these, or if the subject did not run."""

    @property
    def rate_text(self) -> str | None:
        return None if self.rate is None else format_number(self.rate.value)

    @property
    def rate_bounds(self) -> str | None:
        return _bounds(self.rate, format_number)

    @property
    def speedup_text(self) -> str | None:
        return None if self.speedup is None else format_ratio(self.speedup.value)

    @property
    def speedup_bounds(self) -> str | None:
        return _bounds(self.speedup, format_ratio)


def _bounds(figure: Interval | None, form: Callable[[float], str]) -> str | None:
    """Return the bounds of a figure as text; None without a figure."""
    return None if figure is None else format_window_bounds(figure, form)


def _comparison(baseline: BaselineEvidence) -> tuple[doc.Block, ...]:
    """Return the speedups, the chart or table of rates, the method and differences."""
    rows = [_table_row(row) for row in baseline.rows]
    differences = [_differences(row) for row in baseline.rows if row.name != TUNED]
    return (
        doc.bulleted(gains(baseline)),
        _rates(rows, baseline),
        doc.paragraph(_method(baseline)),
        doc.Bullets(items=tuple(differences)),
    )


def _table_row(row: BaselineRow) -> _TableRow:
    """Return a row with its rate and its speedup, and the bounds of both."""
    rate = None
    if row.units_per_s:
        rate = estimate_windows(row.units_per_s).interval()
    speedup = None if row.name == TUNED else row.bounded_speedup
    return _TableRow(row=row, rate=rate, speedup=speedup)


def _rates(
    rows: Sequence[_TableRow], baseline: BaselineEvidence
) -> doc.Table | doc.Chart:
    """Return a chart of the rates with its table; without bounds, the table alone."""
    table = doc.table_of(
        "Data table",
        rows,
        ("settings", "l", lambda row: row.row.words),
        (f"{baseline.unit}/s", "r", lambda row: row.rate_text),
        ("95 % CI", "r", lambda row: row.rate_bounds),
        ("speedup of tuned", "r", lambda row: row.speedup_text),
        ("95 % CI", "r", lambda row: row.speedup_bounds),
        ("data wait", "r", lambda row: format_share(row.row.data_wait_share)),
        ("windows", "r", lambda row: str(len(row.row.units_per_s))),
        ("outcome", "l", lambda row: row.row.outcome),
    )
    bars = [
        doc.Bar(
            label=row.row.words,
            value=row.rate.value,
            low=row.rate.low,
            high=row.rate.high,
            value_text=format_number(row.rate.value),
        )
        for row in rows
        if row.rate is not None and row.rate.low is not None
    ]
    if not bars:
        return table
    rates = ", ".join(f"{bar.label} {bar.value_text}" for bar in bars)
    words = _unit_words(baseline)
    return doc.Chart(
        title=f"{words[0].upper()}{words[1:]}/s before and after tuning",
        description=f"{words[0].upper()}{words[1:]}/s: {rates}. Thin bars: 95 % CI.",
        drawing=doc.BarChart(
            axis=doc.Axis(label=f"{words}/s", unit="count"),
            bars=tuple(bars),
        ),
        table=table,
    )


def _unit_words(baseline: BaselineEvidence) -> str:
    """Return the unit of a comparison in words."""
    if baseline.unit == "tokens" and not baseline.counted_by_size:
        return "non-padding tokens"
    return baseline.unit


def _counted(baseline: BaselineEvidence) -> str:
    """Return how units were counted, in words that follow ``tokens/s``."""
    if baseline.counted_by_size:
        return " of your code are counted by its size, padding included"
    if baseline.unit == "tokens":
        return " excludes padding"
    return " are those that the loader or the step counts"


def _method(baseline: BaselineEvidence) -> str:
    """Describe how the rates and the speedups were measured."""
    return (
        f"{plural(baseline.windows, 'interleaved window')} of at least"
        f" {format_seconds(baseline.window_s)} on"
        f" {plural(baseline.local_ranks, 'rank')}, {format_seconds(baseline.seconds)}"
        " in total; speedups compare windows of the same round."
        f" {baseline.unit}/s{_counted(baseline)}."
    )


def _differences(row: BaselineRow) -> doc.Words:
    """Return a row, its subject and its differences from the tuned settings."""
    parts = [row.subject, *map(_difference, row.differences)]
    return (doc.Strong(text=row.words), f": {'; '.join(parts)}")


def _difference(difference: SettingDifference) -> str:
    """Return a setting with both of its values, and the reason for it if any."""
    text = f"{difference.key}: {format_setting(difference.theirs)}"
    # A forced setting may happen to be the tuned one.
    if difference.theirs != difference.tuned:
        text += f" instead of {format_setting(difference.tuned)}"
    if difference.reason is not None:
        text += f" ({difference.reason})"
    return text
