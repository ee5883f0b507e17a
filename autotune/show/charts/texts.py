"""Names and figures in charts: made harmless, cut to what a chart has room for, in units that people read."""

from autotune.core.units import format_count
from autotune.show.charts.drawing import Unit
from autotune.show.tables import inert

INK = "#010203"
"""Stands for the colour of the page's text, whatever that is."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c8c8c")
"""Told apart by those who see colours differently (Okabe and Ito 2008), and a grey."""
_MOST_LETTERS, _FEW = 44, 4
_BYTE_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def name_in_chart(text: str) -> str:
    """One short line that steers nothing."""
    plain = inert(text)
    return plain if len(plain) <= _MOST_LETTERS else plain[: _MOST_LETTERS - 1] + "…"


def byte_unit(most_bytes: float) -> tuple[str, int]:
    """The largest binary unit of which there are a few, so that parts are not all fractions, and its bytes."""
    return next((unit for unit in _BYTE_UNITS if most_bytes >= _FEW * unit[1]), _BYTE_UNITS[-1])


def tick_text(value: float, unit: Unit, bytes_per_unit: int = 1) -> str:
    """A figure at an axis."""
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        shown = value / bytes_per_unit
        return f"{shown:.3g}" if abs(shown) < 1000 else format_count(shown)
    return format_count(value) if unit == "count" and value == round(value) else f"{value:.4g}"
