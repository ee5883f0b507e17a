"""Figures as text, with their units, bounds and confidence."""

from collections.abc import Callable, Sequence

from autotune.base.interval import NOT_ENOUGH, Interval
from autotune.base.units import format_bytes, format_count


def format_bounds(
    low: float | None, high: float | None, form: Callable[[float], str]
) -> str | None:
    """Return ``850 to 950``, for a heading that names the confidence.

    None if there are no bounds.
    """
    return None if low is None or high is None else f"{form(low)} to {form(high)}"


def format_interval(one: Interval, form: Callable[[float], str]) -> str:
    """Return ``900 (850 to 950, 95 %)``; the value alone if it has no bounds."""
    between = format_bounds(one.low, one.high, form)
    return (
        form(one.value)
        if between is None
        else f"{form(one.value)} ({between}, {format_confidence(one.confidence)})"
    )


def format_bounds_with_confidence(
    one: Interval, form: Callable[[float], str]
) -> str | None:
    """Return ``850 to 950 (95 %)``; None if there are no bounds."""
    between = format_bounds(one.low, one.high, form)
    return between and f"{between} ({format_confidence(one.confidence)})"


def format_windows(one: Interval, form: Callable[[float], str]) -> str:
    """Return ``900 (850 to 950, 95 %)``.

    ``900 (not enough windows)`` if there are no bounds.
    """
    return (
        format_interval(one, form)
        if one.low is not None
        else f"{form(one.value)} ({NOT_ENOUGH})"
    )


def format_window_bounds(one: Interval, form: Callable[[float], str]) -> str:
    """Return ``850 to 950``, for a heading that names the confidence.

    ``not enough windows`` without bounds.
    """
    return format_bounds(one.low, one.high, form) or NOT_ENOUGH


def format_confidence(confidence: float | None) -> str:
    """Return ``95 %``.

    ``range`` for bounds that also rest on assumptions, without a level of confidence.
    """
    return "range" if confidence is None else f"{100 * confidence:.3g} %"


def format_number(value: float) -> str:
    """Return a number, with two decimals if it is below 100 and not whole."""
    return format_count(value, 0 if abs(value) >= 100 or value == round(value) else 2)


def format_ratio(ratio: float) -> str:
    """Return a ratio with two decimals."""
    return f"{ratio:.2f}"


def format_loss(loss: float | None) -> str:
    """Return a loss with three decimals; ``n/a`` if it is missing."""
    return "n/a" if loss is None else f"{loss:.3f}"


def format_hours(value: float) -> str:
    """Return a duration in hours as text, in the unit that fits its size."""
    return hours_formatter(value)(value)


def hours_formatter(size: float) -> Callable[[float], str]:
    """Return the formatter of durations in hours, in the unit that fits one of this size."""
    factor, unit = (
        (1, "h") if size >= 0.1 else (60, "min") if size >= 1 / 60 else (3600, "s")
    )
    return lambda value: f"{factor * value:.3g} {unit}"


def format_bytes_per_s(bytes_per_s: float | None) -> str:
    """Return ``3 GiB/s``; ``n/a`` if it is missing."""
    return "n/a" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def plural(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return (
        f"{number:,} {noun}"
        if number == 1
        else f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"
    )


def install_step(*packages: str) -> str:
    """Return the next step if packages are missing, by their names on PyPI."""
    return f"Install: python -m pip install {' '.join(packages)}"


def shorten_list(names: Sequence[str], nouns: str, most: int = 3) -> str:
    """Return ``a, b, c and 4 more models``."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more {nouns}"


def format_setting(value: object) -> str:
    """Return the value of a setting as a profile writes it."""
    return (
        "not set"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
