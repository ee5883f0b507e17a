"""Before and after: the same training as others would set it up; what the tuning cost, and when that is paid back."""

from collections.abc import Sequence

from autotune.core.evidence import RecipeRow
from autotune.core.interval import SHOWN_CONFIDENCE, Interval
from autotune.core.units import format_seconds, format_share
from autotune.decide.cost import LARGE_JOB_RANKS, PayBack, cost_rows, pay_back
from autotune.show.charts.drawing import Axis, Bar, Bars
from autotune.show.intervals import window_bounds, with_bounds
from autotune.show.report.document import Block, Bullets, Chart, Missing, Paragraph, Strong, Table, Words
from autotune.show.report.figures import count, hours, interval_of, number, plural, times
from autotune.show.report.inputs import ReportedProfile

_NAMES = {"paper-style": "as the paper", "default": "this trainer's defaults", "tuned": "tuned"}


def before_after(one: ReportedProfile) -> tuple[Block, ...]:
    """Three ways to train the same model on the same data."""
    found = one.profile.evidence.baseline
    if found is None:
        command = f"autotune baseline --profile {one.quoted}"
        what = "What the tuned settings are worth against others"
        return (Missing(what=what, commands=(*one.probe_first, command)),)
    table = Table(
        caption="The same as figures",
        headers=("settings", "real tokens/s", "95 % interval", "tuned is faster", "95 % interval", "data wait",
                 "windows", "outcome"),
        rows=tuple(_cells(row) for row in found.rows),
        align="lrrrrrrl",
    )  # fmt: skip
    differences: tuple[Words, ...] = tuple(
        (Strong(text=_NAMES[row.name]), f": {'; '.join(row.differences)}") for row in found.rows if row.differences
    )
    rates = ((row, interval_of(row.real_tokens_per_s)) for row in found.rows)
    ran = [(row, rate) for row, rate in rates if rate is not None and rate.low is not None]
    shown: Block = table
    if ran:
        bars = tuple(_bar(row, rate) for row, rate in ran)
        shown = Chart(
            title="Real tokens per second, before and after",
            description=_said(ran),
            drawing=Bars(axis=Axis(label="real tokens/s", unit="count"), bars=bars),
            table=table,
        )
    how = (
        f"Windows of at least {found.window_s:g} s in turns, {plural(found.windows, 'window')} on "
        f"{plural(found.local_ranks, 'rank')}, {format_seconds(found.seconds)} in all; ratios are of windows of the "
        "same round."
    )
    told = (Bullets(items=differences),) if differences else ()
    return (shown, Paragraph(words=(how,)), *told)


def _bar(row: RecipeRow, rate: Interval) -> Bar:
    return Bar(label=_NAMES[row.name], value=rate.value, low=rate.low, high=rate.high, shown=count(rate.value))


def _cells(row: RecipeRow) -> list[str | None]:
    rate = interval_of(row.real_tokens_per_s)
    ratio = None if row.name == "tuned" else row.tuned_ratio
    return [
        _NAMES[row.name],
        None if rate is None else count(rate.value),
        None if rate is None else window_bounds(rate, count),
        None if ratio is None else times(ratio.value),
        None if ratio is None else window_bounds(ratio, number),
        format_share(row.data_wait_share),
        str(len(row.real_tokens_per_s)),
        row.outcome,
    ]


def _said(ran: Sequence[tuple[RecipeRow, Interval]]) -> str:
    parts = [f"{_NAMES[row.name]} {count(rate.value)}" for row, rate in ran]
    return f"Real tokens per second: {', '.join(parts)}. Thin bars are 95 % intervals."


def cost(one: ReportedProfile) -> tuple[Block, ...]:
    """GPU-hours of all trials, and the training after which they are paid back."""
    rows = cost_rows(one.trials)
    if not rows:
        tune = f"autotune tune --model {one.name} --data DIR"
        return (Missing(what="The cost (the ledger beside this report holds no trial)", commands=(tune,)),)
    spent_s = sum(row.rank_seconds for row in rows)
    unit = f"{one.unit}-hours"
    cells: list[list[str | None]] = [
        [row.job, str(row.trials), format_seconds(row.seconds), hours(row.rank_seconds / 3600)] for row in rows
    ]
    cells.append(
        [
            "all",
            str(sum(row.trials for row in rows)),
            format_seconds(sum(row.seconds for row in rows)),
            hours(spent_s / 3600),
        ]
    )
    table = Table(
        caption="What the tuning cost", headers=("trials of", "number", "time", unit), rows=tuple(cells), align="lrrr"
    )
    said = (
        f"All trials of the ledger took {hours(spent_s / 3600)} of one {one.unit} "
        f"({unit}: time of each trial times the ranks that it kept busy; not the start of jobs, nor what lay idle "
        "beside a trial). "
    )
    found = pay_back(spent_s, one.profile.evidence.baseline)
    if found is None:
        command = f"autotune baseline --profile {one.quoted}"
        return (Paragraph(words=(said,)), table, Missing(what="When that is paid back", commands=(command,)))
    return (Paragraph(words=(said, *_paid(found, one.unit))), table)


def _paid(found: PayBack, unit: str) -> Words:
    if found.rank_hours is None:
        undecided = found.rank_hours_low is not None
        why = "it is undecided whether they are faster" if undecided else "the tuned settings are not faster"
        return (f"Against the default it is not paid back by speed: {why}.",)
    open_end = found.rank_hours_low is not None and found.rank_hours_high is None
    doubt = " At the far end of the interval it never is." if open_end else ""
    after = with_bounds(found.rank_hours, found.rank_hours_low, found.rank_hours_high, hours, SHOWN_CONFIDENCE)
    large = hours(found.rank_hours / LARGE_JOB_RANKS)
    return (
        "Against the default it is paid back (predicted, if the measured ratio holds) after ",
        Strong(text=f"{after} of training on one {unit}"),
        f", shared among as many as there are: {large} on {LARGE_JOB_RANKS}.{doubt}",
    )
