"""Units for reading and writing.

Inside the project everything is bytes, seconds and counts.
"""

import math
import re
import sys
from collections.abc import Mapping

# Factors of the units that are read. Their names are in lower case, as is a unit before
# it is looked up.
_BYTES = {
    "b": 1.0,
    "k": 1e3,
    "kb": 1e3,
    "kib": 2.0**10,
    "m": 1e6,
    "mb": 1e6,
    "mib": 2.0**20,
    "g": 1e9,
    "gb": 1e9,
    "gib": 2.0**30,
    "t": 1e12,
    "tb": 1e12,
    "tib": 2.0**40,
}
_BITS_PER_S = {
    "bit": 1.0,
    "bit/s": 1.0,
    "kbit": 1e3,
    "kbit/s": 1e3,
    "mbit": 1e6,
    "mbit/s": 1e6,
    "gbit": 1e9,
    "gbit/s": 1e9,
    "tbit": 1e12,
    "tbit/s": 1e12,
}
_SECONDS = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_AMOUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}

MIB = 2**20
"""Bytes of a MiB."""
BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
"""Units in which sizes are shown, the largest first."""
_EXACT_BYTE_UNITS = (
    ("TB", 10**12),
    ("TiB", 2**40),
    ("GB", 10**9),
    ("GiB", 2**30),
    ("MB", 10**6),
    ("MiB", 2**20),
)
"""Units of exact sizes, the preferred ones first."""
_ROUNDS_TO_ONE = 0.99995
"""Smallest share of a unit that four significant digits show as 1 of it."""
_ROUNDS_TO_FOUR_DIGITS = 999.5
"""Smallest number that three significant digits would show as ``1e+03``."""
_ROUNDS_TO_FIVE_DIGITS = 9999.5
"""Smallest number that four significant digits would show as ``1e+04``."""
NO_UNIT = "has no unit"
"""Message of the ``ValueError`` for a bare number."""
_QUANTITY = re.compile(
    r"\s*(\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-zµ/]*)\s*"
)
"""Number and unit of a quantity; the unit may be missing."""


def parse_bytes(text: str) -> int:
    """Read a positive size: ``94GB`` or ``94G`` (decimal), or ``94GiB`` (binary).

    Raises:
        ValueError: If the text is not a size.
    """
    return int(_parse_quantity(text, _BYTES, "a size", least=1.0))


def exact_bytes(size_bytes: int) -> str:
    """Return a size that ``parse_bytes`` reads back exactly: ``94GB``, ``2GiB``.

    The unit is the first of ``_EXACT_BYTE_UNITS`` of which the size is a whole number.
    """
    for unit, unit_bytes in _EXACT_BYTE_UNITS:
        if size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return f"{size_bytes}B"


def format_bytes(size_bytes: float | None) -> str:
    """Show a size with a binary unit and three significant digits.

    A missing one shows as ``n/a``.
    """
    if size_bytes is None:
        return "n/a"
    unit, unit_bytes = _unit_that_fits(size_bytes)
    value = size_bytes / unit_bytes
    # Three significant digits would show 1,000 to 1,023 of a unit as ``1.02e+03``.
    if value >= _ROUNDS_TO_FOUR_DIGITS or unit == "B":
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"


def _unit_that_fits(size_bytes: float) -> tuple[str, int]:
    """Return the largest unit that is at most a size, with its bytes; at least B."""
    for unit, unit_bytes in BYTE_UNITS:
        if abs(size_bytes) >= unit_bytes:
            return unit, unit_bytes
    return BYTE_UNITS[-1]


def floor_gib(size_bytes: float) -> str:
    """Return a size as options accept it, in GiB, rounded down: ``93.5GiB``."""
    return f"{math.floor(size_bytes / 2**30 * 10) / 10:g}GiB"


def format_seconds(duration_s: float | None) -> str:
    """Show a duration: ``12 ms``, ``3.4 s``, ``2 min 05 s``, ``1 h 10 min``.

    A missing one shows as ``n/a``.
    """
    if duration_s is None:
        return "n/a"
    duration_ms = duration_s * 1e3
    if duration_ms < _ROUNDS_TO_FOUR_DIGITS:
        return f"{duration_ms:.3g} ms"
    if duration_s < 60:
        return f"{duration_s:.3g} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(value: float | None, digits: int = 0) -> str:
    """Show a number with thousands separators; ``n/a`` if it is missing."""
    return "n/a" if value is None else f"{value:,.{digits}f}"


def format_share(value: float | None) -> str:
    """Show a share between 0 and 1 as a percentage with one decimal: ``31.5 %``.

    A missing one shows as ``n/a``. ``format_percent`` shows no decimal.
    """
    return "n/a" if value is None else f"{value * 100:.1f} %"


def format_percent(share: float) -> str:
    """Show a share between 0 and 1 as a whole percentage: ``32 %``.

    ``format_share`` shows a decimal.
    """
    return f"{share * 100:.0f} %"


def parse_bits_per_s(text: str) -> float:
    """Read a positive rate in bits, such as ``25Gbit`` or ``200 Mbit/s``.

    Raises:
        ValueError: If the text is not a line rate.
    """
    return _parse_quantity(text, _BITS_PER_S, "a line rate")


def parse_seconds(text: str) -> float:
    """Read a duration with a unit, such as ``25us``, ``2s``, ``10min`` or ``4h``.

    Raises:
        ValueError: If the text is not a duration.
    """
    return _parse_quantity(text, _SECONDS, "a duration", least=0.0)


def exact_seconds(duration_s: float) -> str:
    """Return a duration as options accept it: ``10min``, ``90s``, ``500ms``.

    Hours and minutes are used only for whole numbers of them.
    """
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if duration_s >= unit_s and duration_s % unit_s == 0:
            return f"{duration_s / unit_s:g}{unit}"
    if duration_s >= 1:
        return f"{duration_s:g}s"
    if duration_s >= 1e-3:
        return f"{duration_s / 1e-3:g}ms"
    return f"{duration_s / 1e-6:g}us"


def parse_amount(text: str) -> float:
    """Read a positive amount such as ``45.2B``, ``2T``, ``1e22`` or ``202,000,000``.

    Raises:
        ValueError: If the text is not an amount.
    """
    return _parse_quantity(text, _AMOUNTS, "an amount")


def _parse_quantity(
    text: str,
    units: Mapping[str, float],
    kind: str,
    *,
    least: float = sys.float_info.min,
) -> float:
    """Read a number with a unit.

    Args:
        text: Number and unit.
        units: Factor of each unit; the key ``""`` stands for none.
        kind: Kind of quantity, for the message, such as ``a size``.
        least: Smallest value; by default, the smallest positive one.

    Raises:
        ValueError: If the text is no such number, or too small or infinite. The message
            has no subject, which the caller adds: ``is not a size``.
    """
    match = _QUANTITY.fullmatch(text)
    if match:
        digits, unit = match.groups()
        if not unit and "" not in units:
            raise ValueError(NO_UNIT)
        # An unknown unit makes the value NaN, which is outside of every range.
        factor = units.get(unit.lower(), math.nan)
        value = float(re.sub("[_,]", "", digits)) * factor
        if least <= value < math.inf:
            return value
    raise ValueError(f"is not {kind}")


def format_amount(value: float | None) -> str:
    """Show an amount with four significant digits: ``45.2 B``, ``1.414 T``, ``9,400``.

    A missing one shows as ``n/a``.
    """
    if value is None:
        return "n/a"
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= _ROUNDS_TO_ONE * factor:
            scaled = value / factor
            if scaled >= _ROUNDS_TO_FIVE_DIGITS:
                return f"{scaled:,.0f} {unit}"
            return f"{scaled:.4g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
