"""Bounds as words, with the confidence that they have."""

from collections.abc import Callable

from autotune.core.interval import NOT_ENOUGH, Interval


def with_bounds(
    value: float | None,
    low: float | None,
    high: float | None,
    form: Callable[[float], str],
    confidence: float | None,
) -> str | None:
    """``900 (850 to 950, 95 %)``; the value alone where it was not repeated; None where there is none."""
    if value is None:
        return None
    between = bounds(low, high, form)
    return form(value) if between is None else f"{form(value)} ({between}, {confidence_words(confidence)})"


def bounds(low: float | None, high: float | None, form: Callable[[float], str]) -> str | None:
    """``850 to 950``, under a heading that says with which confidence; None where nothing was repeated."""
    return None if low is None or high is None else f"{form(low)} to {form(high)}"


def with_interval(one: Interval, form: Callable[[float], str]) -> str:
    """``900 (850 to 950, 95 %)``; the value alone if it was not repeated."""
    return with_bounds(one.value, one.low, one.high, form, one.confidence) or ""


def of_windows(one: Interval, form: Callable[[float], str]) -> str:
    """``900 (850 to 950, 95 %)``; ``900 (not enough windows)`` if these do not say more."""
    return with_interval(one, form) if one.low is not None else f"{form(one.value)} ({NOT_ENOUGH})"


def window_bounds(one: Interval, form: Callable[[float], str]) -> str:
    """``850 to 950`` under a heading that says with which confidence, or that there are not enough windows."""
    return bounds(one.low, one.high, form) or NOT_ENOUGH


def told_bounds(
    low: float | None, high: float | None, form: Callable[[float], str], confidence: float | None
) -> str | None:
    """``850 to 950 (95 %)``, among others of another confidence."""
    between = bounds(low, high, form)
    return None if between is None else f"{between} ({confidence_words(confidence)})"


def confidence_words(confidence: float | None) -> str:
    """``95 %``; ``range`` where bounds are no interval of confidence, but rest on assumptions as well."""
    return "range" if confidence is None else f"{100 * confidence:.3g} %"
