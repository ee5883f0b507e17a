"""Figures as text, with their units, bounds and confidence."""

from collections.abc import Callable, Sequence

from autotune.base.interval import NOT_ENOUGH, Interval
from autotune.base.units import format_bytes, format_count

_MINUTE_HOURS = 1 / 60


def format_bounds(
    low: float | None, high: float | None, form: Callable[[float], str]
) -> str | None:
    """Return ``850 to 950``, for a heading that names the confidence.

    Returns:
        The text, or None if there are no bounds.
    """
    if low is None or high is None:
        return None
    return f"{form(low)} to {form(high)}"


def format_interval(interval: Interval, form: Callable[[float], str]) -> str:
    """Return ``900 (850 to 950, 95 %)``; the value alone if it has no bounds."""
    value = form(interval.value)
    bounds = format_bounds(interval.low, interval.high, form)
    if bounds is None:
        return value
    return f"{value} ({bounds}, {format_confidence(interval.confidence)})"


def format_bounds_with_confidence(
    interval: Interval, form: Callable[[float], str]
) -> str | None:
    """Return ``850 to 950 (95 %)``; None if there are no bounds."""
    bounds = format_bounds(interval.low, interval.high, form)
    if bounds is None:
        return None
    return f"{bounds} ({format_confidence(interval.confidence)})"


def format_windows(interval: Interval, form: Callable[[float], str]) -> str:
    """Return the value of several windows: ``900 (850 to 950, 95 %)``.

    Without bounds it is ``900 (not enough windows)``.
    """
    if interval.low is None:
        return f"{form(interval.value)} ({NOT_ENOUGH})"
    return format_interval(interval, form)


def format_window_bounds(interval: Interval, form: Callable[[float], str]) -> str:
    """Return ``850 to 950``, for a heading that names the confidence.

    Without bounds it is ``not enough windows``.
    """
    return format_bounds(interval.low, interval.high, form) or NOT_ENOUGH


def format_confidence(confidence: float | None) -> str:
    """Return ``95 %``.

    Bounds that also rest on assumptions have no level of confidence: ``range``.
    """
    return "range" if confidence is None else f"{100 * confidence:.3g} %"


def format_number(value: float) -> str:
    """Return a number, with two decimals if it is below 100 and not whole."""
    is_whole = value == round(value)
    return format_count(value, 0 if is_whole or abs(value) >= 100 else 2)


def format_ratio(ratio: float) -> str:
    """Return a ratio with two decimals."""
    return f"{ratio:.2f}"


def format_times(ratio: float) -> str:
    """Return a multiple of another value: ``1.20x``."""
    return f"{format_ratio(ratio)}x"


def format_loss(loss_nats: float | None) -> str:
    """Return a loss with three decimals; ``n/a`` if it is missing."""
    return "n/a" if loss_nats is None else f"{loss_nats:.3f}"


def format_hours(hours: float) -> str:
    """Return a duration in hours as text, in the unit that fits its size."""
    return hours_formatter(hours)(hours)


def hours_formatter(typical_hours: float) -> Callable[[float], str]:
    """Return a function that formats durations in hours.

    All in the unit that fits a duration of ``typical_hours``.
    """
    if typical_hours >= 0.1:
        units_per_hour, unit = 1, "h"
    elif typical_hours >= _MINUTE_HOURS:
        units_per_hour, unit = 60, "min"
    else:
        units_per_hour, unit = 3600, "s"
    return lambda hours: f"{units_per_hour * hours:.3g} {unit}"


def format_bytes_per_s(bytes_per_s: float | None) -> str:
    """Return ``3 GiB/s``; ``n/a`` if it is missing."""
    return "n/a" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def plural(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{ending}"


def install_step(*packages: str) -> str:
    """Return the next step if packages are missing, by their names on PyPI."""
    return f"Install: python -m pip install {' '.join(packages)}"


def shorten_list(names: Sequence[str], nouns: str, max_names: int = 3) -> str:
    """Return ``a, b, c and 4 more models``.

    One name more than ``max_names`` is still shown, as it needs no more room than the
    words about it.
    """
    if len(names) <= max_names + 1:
        return ", ".join(names)
    shown = ", ".join(names[:max_names])
    return f"{shown} and {len(names) - max_names:,} more {nouns}"


def format_setting(value: object) -> str:
    """Return the value of a setting as a profile writes it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
