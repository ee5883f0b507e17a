"""Units for reading and writing.

Inside the project everything is bytes, seconds and counts.
"""

import math
import re
import sys
from collections.abc import Mapping

_BYTES = {"b": 1.0} | {
    f"{prefix}{unit}": float(base**power)
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("", 10**3), ("b", 10**3), ("ib", 2**10))
}
_BITS_PER_S = {
    f"{prefix}bit{per}": 1e3**power
    for power, prefix in enumerate(["", *"kmgt"])
    for per in ("", "/s")
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
BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
"""Units in which sizes are shown, the largest first."""
NO_UNIT = "has no unit"
"""Message of the ``ValueError`` for a bare number."""
_NUMBER = re.compile(
    r"\s*(\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-zµ/]*)\s*"
)


def parse_bytes(text: str) -> int:
    """Read a positive size such as ``94GB`` or ``94G`` (decimal), or ``94GiB`` (binary); else raise ``ValueError``."""
    return int(_quantity(text, _BYTES, "a size", least=1.0))


def exact_bytes(size_bytes: int) -> str:
    """Return a size that ``parse_bytes`` reads back exactly, in the largest whole unit: ``94GB``, ``2GiB``."""
    units = {
        "TB": 10**12,
        "TiB": 2**40,
        "GB": 10**9,
        "GiB": 2**30,
        "MB": 10**6,
        "MiB": 2**20,
    }
    return next(
        (
            f"{size_bytes // one}{unit}"
            for unit, one in units.items()
            if not size_bytes % one
        ),
        f"{size_bytes}B",
    )


def format_bytes(size_bytes: float | None) -> str:
    """Show a size with a binary unit and three significant digits.

    ``n/a`` if it is missing.
    """
    if size_bytes is None:
        return "n/a"
    unit, unit_bytes = next(
        (one for one in BYTE_UNITS if abs(size_bytes) >= one[1]), BYTE_UNITS[-1]
    )
    value = size_bytes / unit_bytes
    return (
        f"{value:.0f} {unit}" if value >= 1000 or unit == "B" else f"{value:.3g} {unit}"
    )


def floor_gib(size_bytes: float) -> str:
    """Return a size in GiB as options accept it, rounded down to a tenth: ``93.5GiB``."""
    return f"{math.floor(size_bytes / 2**30 * 10) / 10:g}GiB"


def format_seconds(duration_s: float | None) -> str:
    """Show a duration: ``12 ms``, ``3.4 s``, ``2 min 05 s``, ``1 h 10 min``.

    ``n/a`` if it is missing.
    """
    if duration_s is None:
        return "n/a"
    if duration_s < 1:
        return f"{duration_s * 1e3:.3g} ms"
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
    """Show a share between 0 and 1 as a percentage; ``n/a`` if it is missing."""
    return "n/a" if value is None else f"{value * 100:.1f} %"


def format_percent(share: float) -> str:
    """Return a share as a whole percentage."""
    return f"{share * 100:.0f} %"


def parse_bits_per_s(text: str) -> float:
    """Read a positive rate in bits, such as ``25Gbit`` or ``200 Mbit/s``.

    Else raise ``ValueError``.
    """
    return _quantity(text, _BITS_PER_S, "a line rate")


def parse_seconds(text: str) -> float:
    """Read a duration with a unit, such as ``25us``, ``2s``, ``10min`` or ``4h``.

    Else raise ``ValueError``.
    """
    return _quantity(text, _SECONDS, "a duration", least=0.0)


def exact_seconds(duration_s: float) -> str:
    """Return a duration as options accept it, in the largest whole unit: ``10min``, ``90s``, ``500ms``."""
    short = (
        (1.0, "s")
        if duration_s >= 1
        else (1e-3, "ms")
        if duration_s >= 1e-3
        else (1e-6, "us")
    )
    long = (
        one
        for one in ((3600.0, "h"), (60.0, "min"))
        if duration_s >= one[0] and not duration_s % one[0]
    )
    factor, unit = next(long, short)
    return f"{duration_s / factor:g}{unit}"


def parse_amount(text: str) -> float:
    """Read a positive amount such as ``45.2B``, ``2T``, ``1e22`` or ``202,000,000``.

    Else raise ``ValueError``.
    """
    return _quantity(text, _AMOUNTS, "an amount")


def _quantity(
    text: str,
    units: Mapping[str, float],
    kind: str,
    *,
    least: float = sys.float_info.min,
) -> float:
    match = _NUMBER.fullmatch(text)
    if match and not match[2] and "" not in units:
        raise ValueError(NO_UNIT)
    value = (
        float(re.sub("[_,]", "", match[1])) * units.get(match[2].lower(), math.nan)
        if match
        else math.nan
    )
    if least <= value < math.inf:
        return value
    raise ValueError(f"is not {kind}")


def format_amount(value: float | None) -> str:
    """Show an amount with four significant digits: ``45.2 B``, ``1.414 T``, ``9,400``.

    ``n/a`` if it is missing.
    """
    if value is None:
        return "n/a"
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= 0.99995 * factor:
            scaled = value / factor
            return (
                f"{scaled:,.0f} {unit}" if scaled >= 9999.5 else f"{scaled:.4g} {unit}"
            )
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
