"""How pages write figures, beyond ``autotune.base.units``."""

from collections.abc import Iterable, Mapping
from typing import Any

Rows = list[list[str]]
"""Rows of a table, whose head stands on the page."""
Figures = dict[str, str | Rows]
"""Text or rows of a table for each key."""


def row(*cells: object) -> list[str]:
    """Return a row of a table."""
    return [str(cell) for cell in cells]


def times(ratio: float, digits: int = 1) -> str:
    """Show a ratio with the sign for times."""
    return f"{ratio:.{digits}f} \N{MULTIPLICATION SIGN}"


def percent(share: float, digits: int) -> str:
    """Show a share with a number of decimals: ``0.015 %``."""
    return f"{share * 100:.{digits}f} %"


def difference(ratio: float, digits: int = 0) -> str:
    """Show how far a ratio is from 1: ``+7 %``."""
    return f"{(ratio - 1) * 100:+.{digits}f} %"


def seconds(duration_s: float, digits: int) -> str:
    """Show a duration in seconds, whatever its size: ``0.082 s``."""
    return f"{duration_s:.{digits}f} s"


def worst_error(
    rows: Iterable[Mapping[str, Any]], predicted: str, measured: str
) -> float:
    """Return the largest relative error of a prediction.

    Args:
        rows: Predictions beside measurements.
        predicted: Key of the prediction in a row.
        measured: Key of the measurement in a row.
    """
    return max(abs(float(row[predicted] / row[measured]) - 1) for row in rows)


def speedup(profile: Mapping[str, Any], baseline: str) -> str:
    """Show the speedup of a profile over a baseline with its 95 % interval."""
    rows = {row["name"]: row for row in profile["evidence"]["baseline"]["rows"]}
    measured = rows[baseline]
    interval = f"{measured['speedup_low']:.1f} to {measured['speedup_high']:.1f}"
    return f"{times(measured['speedup'])} ({interval})"
