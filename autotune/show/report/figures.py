"""Figures with their units and intervals, as words."""

import math
from collections.abc import Sequence

from autotune.core.interval import Interval
from autotune.core.units import format_count
from autotune.decide.statistics import of_windows


def nats(loss: float | None) -> str:
    """A loss."""
    return "n/a" if loss is None else f"{loss:.3f}"


def interval_of(figures: Sequence[float]) -> Interval | None:
    """Return where they lie with 95 % bounds; None if there is none above nought, which files of others may hold."""
    known = [figure for figure in figures if 0 < figure < math.inf]
    return of_windows(known).interval() if known else None


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


def plural(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def listed(names: Sequence[str], nouns: str, most: int = 3) -> str:
    """``a, b, c and 4 more models``."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more {nouns}"
