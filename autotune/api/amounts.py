"""Amounts as a caller gives them: a number, or a text with its unit."""

from collections.abc import Callable
from typing import TypeVar

from autotune.base.units import parse_bytes, parse_seconds

AmountT = TypeVar("AmountT", int, float)


def seconds_of(duration: str | float) -> float:
    """Return a duration in seconds, such as ``"10min"`` or 600.

    Raises:
        ValueError: If the text is no duration.
    """
    if isinstance(duration, str):
        return _parsed(duration, parse_seconds)
    return float(duration)


def bytes_of(memory: str | int) -> int:
    """Return a number of bytes, such as ``"40GB"`` or 40,000,000,000.

    Raises:
        ValueError: If the text is no size.
    """
    if isinstance(memory, str):
        return _parsed(memory, parse_bytes)
    return memory


def _parsed(text: str, parse: Callable[[str], AmountT]) -> AmountT:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r} {error}") from None
