"""What the tuned settings are worth against others that train the same model on the same data."""

from collections.abc import Iterator
from pathlib import Path

from autotune.core.evidence import BaselineEvidence, RecipeRow, SettingDifference, SettingValue
from autotune.core.units import format_seconds, format_share
from autotune.show.document import Block, Bullets, Chart, Missing, Pairs, Paragraph, Strong, Table, Words, told
from autotune.show.drawing import Axis, Bar, Bars
from autotune.show.intervals import count, interval_of, number, of_windows, plural, window_bounds
from autotune.show.report.inputs import ReportedProfile
from autotune.show.text import console_text


def baseline_text(found: BaselineEvidence, profile: Path) -> str:
    """The answer for people, and what to run next."""
    following = (("profile", (str(profile),)), ("next", (f"autotune report build {profile}",)))
    return console_text((*_compared(found), Pairs(pairs=following)))


def baseline_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Three ways to train."""
    found = one.profile.evidence.baseline
    if found is None:
        command = f"autotune baseline --profile {one.quoted}"
        what = "What the tuned settings are worth against others"
        return (Missing(what=what, commands=(*one.probe_first, command)),)
    return _compared(found)


def gains(found: BaselineEvidence) -> Iterator[str]:
    """How many times as fast the tuned settings are, a line for each of the others."""
    for row in found.rows:
        if row.name == "tuned":
            continue
        if row.bounded_speedup is None:
            yield f"tuned, against {row.name}: n/a ({row.outcome})"
            continue
        yield f"tuned, against {row.name}: {of_windows(row.bounded_speedup, number)} times the real tokens per second"


def _compared(found: BaselineEvidence) -> tuple[Block, ...]:
    table = Table(
        caption="The same as figures",
        headers=("settings", "real tokens/s", "95 % interval", "tuned is faster", "95 % interval", "data wait",
                 "windows", "outcome"),
        rows=tuple(_cells(row) for row in found.rows),
        align="lrrrrrrl",
    )  # fmt: skip
    bars = []
    for row in found.rows:
        rate = interval_of(row.real_tokens_per_s)
        if rate is not None and rate.low is not None:
            bars.append(Bar(label=row.name, value=rate.value, low=rate.low, high=rate.high, shown=count(rate.value)))
    shown: Block = table
    if bars:
        rates = ", ".join(f"{bar.label} {bar.shown}" for bar in bars)
        shown = Chart(
            title="Real tokens per second, before and after",
            description=f"Real tokens per second: {rates}. Thin bars are 95 % intervals.",
            drawing=Bars(axis=Axis(label="real tokens/s", unit="count"), bars=tuple(bars)),
            table=table,
        )
    how = (
        f"{plural(found.windows, 'window')} of at least {format_seconds(found.window_s)} in turns, on "
        f"{plural(found.local_ranks, 'rank')}, {format_seconds(found.seconds)} in all; ratios are of windows of the "
        "same round. Padding does not count; model, data, length of rows and global batch are the same."
    )
    differences: tuple[Words, ...] = tuple(
        (
            Strong(text=row.name),
            f": {'; '.join(map(_told, row.differences)) or 'nothing differs from the tuned settings'}",
        )
        for row in found.rows
        if row.name != "tuned"
    )
    return (told(gains(found)), shown, Paragraph(words=(how,)), Bullets(items=differences))


def _told(one: SettingDifference) -> str:
    instead = "" if one.theirs == one.tuned else f" instead of {_value(one.tuned)}"
    return f"{one.key}: {_value(one.theirs)}{instead}" + ("" if one.reason is None else f" ({one.reason})")


def _value(value: SettingValue) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cells(row: RecipeRow) -> list[str | None]:
    rate = interval_of(row.real_tokens_per_s)
    ratio = None if row.name == "tuned" else row.bounded_speedup
    return [
        row.name,
        None if rate is None else count(rate.value),
        None if rate is None else window_bounds(rate, count),
        None if ratio is None else f"{number(ratio.value)} times",
        None if ratio is None else window_bounds(ratio, number),
        format_share(row.data_wait_share),
        str(len(row.real_tokens_per_s)),
        row.outcome,
    ]
