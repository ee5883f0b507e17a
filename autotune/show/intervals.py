"""Bounds as words, with the confidence that they have."""

from collections.abc import Callable


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


def told_bounds(
    low: float | None, high: float | None, form: Callable[[float], str], confidence: float | None
) -> str | None:
    """``850 to 950 (95 %)``, among others of another confidence."""
    between = bounds(low, high, form)
    return None if between is None else f"{between} ({confidence_words(confidence)})"


def confidence_words(confidence: float | None) -> str:
    """``95 %``; ``range`` where bounds are no interval of confidence, but rest on assumptions as well."""
    return "range" if confidence is None else f"{100 * confidence:.3g} %"
