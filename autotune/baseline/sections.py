"""Report sections on the speedup over other recipes, and on the cost of tuning."""

from collections.abc import Iterator
from pathlib import Path

from autotune.base.document import (
    Axis,
    Bar,
    Bars,
    Block,
    Bullets,
    Chart,
    Missing,
    Pairs,
    Paragraph,
    Strong,
    Words,
    table_of,
    told,
)
from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.render import console_text
from autotune.base.units import format_seconds, format_share
from autotune.base.wording import (
    count,
    hours,
    interval_of,
    number,
    of_windows,
    plural,
    setting_text,
    window_bounds,
    with_interval,
)
from autotune.baseline.decide.pay_back import LARGE_JOB_RANKS, CostRow, PayBack, cost_rows, pay_back
from autotune.baseline.values import BaselineEvidence, SettingDifference, SettingValue
from autotune.profiles.decide.follow_up import command, probe_first
from autotune.report.values import ReportedProfile


def baseline_text(found: BaselineEvidence, profile: Path) -> str:
    """Return the comparison and the next command, for the console."""
    following = (("profile", (str(profile),)), ("next", (command("report", profile),)))
    return console_text((*_compared(found), Pairs(pairs=following)))


def baseline_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the comparison of the tuned settings with both baselines, or the command that measures it."""
    found = one.profile.evidence.baseline
    if found is None:
        commands = (*probe_first(one.profile, one.path), f"autotune baseline {one.quoted}")
        return (Missing(what="Speedup over the baselines", commands=commands),)
    return _compared(found)


def gains(found: BaselineEvidence) -> Iterator[str]:
    """Yield the speedup of the tuned settings over each baseline, one line each."""
    for row in found.rows:
        if row.name == "tuned":
            continue
        ratio = row.bounded_speedup
        speedup = f"n/a ({row.outcome})" if ratio is None else f"{of_windows(ratio, number)} times as fast"
        yield f"tuned vs {row.name}: {speedup}"


def _compared(found: BaselineEvidence) -> tuple[Block, ...]:
    rows = [
        (row, interval_of(row.tokens_per_s), None if row.name == "tuned" else row.bounded_speedup) for row in found.rows
    ]
    table = table_of(
        "Data table", rows,
        ("settings", "l", lambda one: one[0].name),
        ("tokens/s", "r", lambda one: count(one[1].value) if one[1] else None),
        ("95 % CI", "r", lambda one: window_bounds(one[1], count) if one[1] else None),
        ("speedup of tuned", "r", lambda one: number(one[2].value) if one[2] else None),
        ("95 % CI", "r", lambda one: window_bounds(one[2], number) if one[2] else None),
        ("data wait", "r", lambda one: format_share(one[0].data_wait_share)),
        ("windows", "r", lambda one: str(len(one[0].tokens_per_s))),
        ("outcome", "l", lambda one: one[0].outcome),
    )  # fmt: skip
    bars = [
        Bar(label=row.name, value=rate.value, low=rate.low, high=rate.high, shown=count(rate.value))
        for row, rate, _ in rows
        if rate is not None and rate.low is not None
    ]
    shown: Block = table
    if bars:
        rates = ", ".join(f"{bar.label} {bar.shown}" for bar in bars)
        shown = Chart(
            title="Non-padding tokens/s before and after tuning",
            description=f"Non-padding tokens/s: {rates}. Thin bars: 95 % CI.",
            drawing=Bars(axis=Axis(label="non-padding tokens/s", unit="count"), bars=tuple(bars)),
            table=table,
        )
    how = (
        f"{plural(found.windows, 'interleaved window')} of at least {format_seconds(found.window_s)} on "
        f"{plural(found.local_ranks, 'rank')}, {format_seconds(found.seconds)} in total; speedups compare windows of "
        "the same round. tokens/s excludes padding. Model, data, sequence length and global batch are the same."
    )
    differences: tuple[Words, ...] = tuple(
        (Strong(text=row.name), f": {'; '.join(map(_difference, row.differences)) or 'same as tuned'}")
        for row in found.rows
        if row.name != "tuned"
    )
    return (told(gains(found)), shown, Paragraph(words=(how,)), Bullets(items=differences))


def _difference(one: SettingDifference) -> str:
    instead = "" if one.theirs == one.tuned else f" instead of {_value(one.tuned)}"
    return f"{one.key}: {_value(one.theirs)}{instead}" + ("" if one.reason is None else f" ({one.reason})")


def _value(value: SettingValue) -> str:
    return "unset" if value is None else setting_text(value)


def cost_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the GPU-hours of all trials, and the training that pays them back."""
    rows = cost_rows(one.trials)
    if not rows:
        tune = f"autotune tune --model {one.name} --data DIR"
        return (Missing(what="Cost of tuning (no trials in the trial log)", commands=(tune,)),)
    spent_s = sum(row.rank_seconds for row in rows)
    unit = f"{one.unit}-hours"
    trials, seconds = sum(row.trials for row in rows), sum(row.seconds for row in rows)
    table = table_of(
        "Cost of tuning", (*rows, CostRow(job="all", trials=trials, seconds=seconds, rank_seconds=spent_s)),
        ("trials of", "l", lambda row: row.job),
        ("number", "r", lambda row: str(row.trials)),
        ("time", "r", lambda row: format_seconds(row.seconds)),
        (unit, "r", lambda row: hours(row.rank_seconds / 3600)),
    )  # fmt: skip
    cost = (
        f"Tuning took {hours(spent_s / 3600)} of one {one.unit} (trial time times busy ranks, without job start-up). "
    )
    found = pay_back(spent_s, one.profile.evidence.baseline)
    if found is None:
        missing = Missing(what="Pay-back time", commands=(f"autotune baseline {one.quoted}",))
        return (Paragraph(words=(cost,)), table, missing)
    return (Paragraph(words=(cost, *_paid(found, one.unit))), table)


def _paid(found: PayBack, unit: str) -> Words:
    if found.rank_hours is None:
        undecided = found.rank_hours_low is not None
        why = "are not verified to be faster" if undecided else "are not faster"
        return (f"It does not pay for itself: the tuned settings {why} than HF Trainer.",)
    open_end = found.rank_hours_low is not None and found.rank_hours_high is None
    doubt = " At the lower bound of the speedup, it never does." if open_end else ""
    spent = Interval.of(found.rank_hours, found.rank_hours_low, found.rank_hours_high, SHOWN_CONFIDENCE)
    large = hours(found.rank_hours / LARGE_JOB_RANKS)
    return (
        "Compared with HF Trainer, it pays for itself (predicted) after ",
        Strong(text=f"{with_interval(spent, hours)} of training on one {unit}"),
        f", or {large} on {LARGE_JOB_RANKS}.{doubt}",
    )
