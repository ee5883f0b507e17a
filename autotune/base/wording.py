"""Figures, numbers of things, lists and settings as text.

A value that was measured in windows has bounds at a level of confidence. How to show an
interval of 900, from 850 to 950, and how if it has no bounds:

===============================  =======================  ========================
function                         shows                    without bounds
===============================  =======================  ========================
format_interval                  900 (850 to 950, 95 %)   900
format_windows                   900 (850 to 950, 95 %)   900 (not enough windows)
format_bounds_with_confidence    850 to 950 (95 %)        None
format_bounds                    850 to 950               None
format_window_bounds             850 to 950               not enough windows
===============================  =======================  ========================
"""

from collections.abc import Callable, Sequence

from autotune.base.interval import NOT_ENOUGH, Interval
from autotune.base.units import format_bytes, format_count

_MINUTE_HOURS = 1 / 60
"""Shortest duration that is shown in minutes."""
_FEWEST_HOURS_IN_HOURS = 0.1
"""Shortest duration that is shown in hours; 5 min reads better than 0.0833 h."""


def format_bounds(
    low: float | None, high: float | None, form: Callable[[float], str]
) -> str | None:
    """Return two bounds; None without them.

    It does not show the confidence, which the heading of a table names.
    """
    if low is None or high is None:
        return None
    return f"{form(low)} to {form(high)}"


def format_interval(interval: Interval, form: Callable[[float], str]) -> str:
    """Return a value with its bounds and confidence; without bounds, the value alone.

    Use it if an exact value is as usual as a measured one.
    """
    value = form(interval.value)
    bounds = format_bounds(interval.low, interval.high, form)
    if bounds is None:
        return value
    return f"{value} ({bounds}, {format_confidence(interval.confidence)})"


def format_bounds_with_confidence(
    interval: Interval, form: Callable[[float], str]
) -> str | None:
    """Return bounds and confidence without the value; None without bounds."""
    bounds = format_bounds(interval.low, interval.high, form)
    if bounds is None:
        return None
    return f"{bounds} ({format_confidence(interval.confidence)})"


def format_windows(interval: Interval, form: Callable[[float], str]) -> str:
    """Return a value that is measured in windows, with its bounds and confidence.

    If the windows were too few for bounds, it says so.
    """
    if interval.low is None:
        return f"{form(interval.value)} ({NOT_ENOUGH})"
    return format_interval(interval, form)


def format_window_bounds(interval: Interval, form: Callable[[float], str]) -> str:
    """Return the bounds of a value that is measured in windows, for a table's column.

    If the windows were too few for bounds, it says so.
    """
    bounds = format_bounds(interval.low, interval.high, form)
    return NOT_ENOUGH if bounds is None else bounds


def format_confidence(confidence: float | None) -> str:
    """Return a level of confidence: ``95 %``.

    Bounds that also rest on assumptions have no such level: ``range``.
    """
    return "range" if confidence is None else f"{100 * confidence:.3g} %"


def format_number(value: float) -> str:
    """Return a number, with two decimals if it is below 100 and not whole."""
    is_whole = value == round(value)
    digits = 0 if is_whole or abs(value) >= 100 else 2
    return format_count(value, digits)


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
    """Return a function that formats durations in hours, all of them in one unit.

    Args:
        typical_hours: Duration that decides the unit.
    """
    if typical_hours >= _FEWEST_HOURS_IN_HOURS:
        return lambda hours: f"{hours:.3g} h"
    if typical_hours >= _MINUTE_HOURS:
        return lambda hours: f"{60 * hours:.3g} min"
    return lambda hours: f"{3600 * hours:.3g} s"


def format_bytes_per_s(bytes_per_s: float | None) -> str:
    """Return ``3 GiB/s``; ``n/a`` if it is missing."""
    return "n/a" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def plural(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{ending}"


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
