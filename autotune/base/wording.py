"""Figures as words, with their units, their bounds and the confidence of those."""

import math
from collections.abc import Callable, Sequence

from autotune.base.interval import NOT_ENOUGH, Interval
from autotune.base.statistics import of_windows as interval_of_windows
from autotune.base.units import format_bytes, format_count


def bounds(low: float | None, high: float | None, form: Callable[[float], str]) -> str | None:
    """``850 to 950``, under a heading that says with which confidence; None where nothing was repeated."""
    return None if low is None or high is None else f"{form(low)} to {form(high)}"


def with_interval(one: Interval, form: Callable[[float], str]) -> str:
    """``900 (850 to 950, 95 %)``; the value alone if it was not repeated."""
    between = bounds(one.low, one.high, form)
    return form(one.value) if between is None else f"{form(one.value)} ({between}, {confidence_words(one.confidence)})"


def bounds_with_confidence(one: Interval, form: Callable[[float], str]) -> str | None:
    """``850 to 950 (95 %)``; None if it was not repeated."""
    between = bounds(one.low, one.high, form)
    return between and f"{between} ({confidence_words(one.confidence)})"


def of_windows(one: Interval, form: Callable[[float], str]) -> str:
    """``900 (850 to 950, 95 %)``; ``900 (not enough windows)`` if these do not say more."""
    return with_interval(one, form) if one.low is not None else f"{form(one.value)} ({NOT_ENOUGH})"


def window_bounds(one: Interval, form: Callable[[float], str]) -> str:
    """``850 to 950`` under a heading that says with which confidence, or that there are not enough windows."""
    return bounds(one.low, one.high, form) or NOT_ENOUGH


def confidence_words(confidence: float | None) -> str:
    """``95 %``; ``range`` where bounds are no interval of confidence, but rest on assumptions as well."""
    return "range" if confidence is None else f"{100 * confidence:.3g} %"


def interval_of(figures: Sequence[float]) -> Interval | None:
    """Return where they lie with 95 % bounds; None if there is none above nought, which files of others may hold."""
    known = [figure for figure in figures if 0 < figure < math.inf]
    return interval_of_windows(known).interval() if known else None


def count(value: float) -> str:
    """A number with three digits at least."""
    return format_count(value, 0 if abs(value) >= 100 or value == round(value) else 2)


def number(ratio: float) -> str:
    """A ratio."""
    return f"{ratio:.2f}"


def nats(loss: float | None) -> str:
    """A loss."""
    return "n/a" if loss is None else f"{loss:.3f}"


def hours(value: float) -> str:
    """Hours of a rank, in words that fit their size."""
    if value >= 0.1:
        return f"{value:.3g} h"
    return f"{60 * value:.3g} min" if value >= 1 / 60 else f"{3600 * value:.3g} s"


def per_s(bytes_per_s: float | None) -> str:
    """``3 GiB/s``; ``n/a`` when it is missing."""
    return "n/a" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def plural(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def listed(names: Sequence[str], nouns: str, most: int = 3) -> str:
    """``a, b, c and 4 more models``."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more {nouns}"


def setting_text(value: object) -> str:
    """Return the value of a setting as a profile has it."""
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
