"""Figures with their units and intervals, as words."""

import math
import statistics
from collections.abc import Callable, Sequence

from autotune.core.advice import Unit
from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.decide.statistics import Interval, mean_interval
from autotune.show.report.document import Block, Section
from autotune.show.report.inputs import ReportedProfile


def with_bounds(value: float | None, low: float | None, high: float | None, form: Callable[[float], str]) -> str | None:
    """``900 (850 to 950)``; the value alone where it was not repeated; None where there is none."""
    if value is None:
        return None
    between = bounds(low, high, form)
    return form(value) if between is None else f"{form(value)} ({between})"


def bounds(low: float | None, high: float | None, form: Callable[[float], str]) -> str | None:
    """``850 to 950``; None where nothing was repeated."""
    return None if low is None or high is None else f"{form(low)} to {form(high)}"


def interval_of(figures: Sequence[float]) -> Interval | None:
    """Their mean with 95 % bounds; None where there is none above nought, which files of others may hold."""
    known = [figure for figure in figures if 0 < figure < math.inf]
    if not known:
        return None
    try:
        return mean_interval(known)
    except OverflowError:  # so far apart that their bounds are no numbers
        return Interval(value=statistics.median(known), low=None, high=None)


def count(value: float) -> str:
    """With three digits at least."""
    return format_count(value, 0 if abs(value) >= 100 or value == round(value) else 2)


def times(ratio: float) -> str:
    """A ratio."""
    return f"{ratio:.2f} times"


def number(ratio: float) -> str:
    """The same without its unit, for bounds."""
    return f"{ratio:.2f}"


def hours(value: float) -> str:
    """Hours of a rank, in words that fit their size."""
    if value >= 0.1:
        return f"{value:.3g} h"
    return f"{60 * value:.3g} min" if value >= 1 / 60 else f"{3600 * value:.3g} s"


def in_unit(unit: Unit) -> Callable[[float], str]:
    """How a figure of the evidence is written."""
    forms: dict[Unit, Callable[[float], str]] = {
        "share": format_share,
        "ratio": lambda value: f"{value:.3g} times",
        "tokens/s": lambda value: f"{count(value)} tokens/s",
        "bytes": format_bytes,
        "bytes/s": lambda value: f"{format_bytes(value)}/s",
        "FLOP/s": lambda value: f"{value / 1e12:.3g} TFLOP/s",
        "s": format_seconds,
        "tokens": lambda value: f"{count(value)} tokens",
        "rows": lambda value: f"{count(value)} rows",
        "count": count,
    }
    return forms.get(unit, lambda value: f"{value:.4g} {unit}")


def plural(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def part_of_each(
    profiles: Sequence[ReportedProfile], key: str, make: Callable[[ReportedProfile], tuple[Block, ...]]
) -> tuple[Block, ...]:
    """What is to be said of each profile: under its own title where there are several."""
    if len(profiles) == 1:
        return make(profiles[0])
    return tuple(
        Section(title=one.path.stem, key=f"{key}-{number}", blocks=make(one))
        for number, one in enumerate(profiles, start=1)
    )
