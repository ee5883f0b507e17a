"""Scales, ticks, units and names of a chart's axes."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autotune.base.document import Axis, Unit
from autotune.base.tables import printable_line
from autotune.base.units import BYTE_UNITS, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_NAME_CHARACTERS = 44
"""Longest name in a chart; longer ones are cut, as they would leave no room to draw."""
_MIN_UNITS = 4
"""Fewest units of bytes that the largest value of an axis has. If an axis to 2 GiB were
in GiB, all parts of a bar would be fractions."""
_BYTE_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Steps between ticks on an axis of bytes, in its unit."""
_MAX_BYTE_TICKS = 8
"""Most ticks on an axis of bytes."""
_MAX_LABELS = 24
"""Number of labels that fit beside each other below a chart."""
_MAX_LINEAR_INTERVALS = 6
"""Most intervals between ticks that are chosen automatically on a linear axis."""
_NARROW_RANGE = 30
"""Ratio of the largest to the smallest value below which a decimal logarithmic axis
has ticks between powers of ten."""
_TINY = 1e-300
"""Stands for 0 on a logarithmic axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUnit:
    """Unit in which an axis shows its values."""

    kind: Unit
    name: str = ""
    """Name of a unit of bytes, such as ``GiB``; empty for other kinds."""
    size: int = 1
    """Bytes of a unit of bytes."""

    def format(self, value: float) -> str:
        """Return the text of a value, without the unit's name."""
        if self.kind == "share":
            return f"{100 * value:.3g} %"
        if self.kind == "bytes":
            units = value / self.size
            return f"{units:.3g}" if abs(units) < 1000 else format_count(units)
        if self.kind == "count" and value == round(value):
            return format_count(value)
        return f"{value:.4g}"


def axis_unit(axis: Axis, largest: float) -> AxisUnit:
    """Return the unit of an axis on which ``largest`` is the largest value."""
    if axis.unit != "bytes":
        return AxisUnit(kind=axis.unit)
    for name, size in BYTE_UNITS:
        if largest >= _MIN_UNITS * size:
            return AxisUnit(kind="bytes", name=name, size=size)
    name, size = BYTE_UNITS[-1]
    return AxisUnit(kind="bytes", name=name, size=size)


def scale_axis(
    axes: "Axes", direction: Literal["x", "y"], axis: Axis, values: list[float]
) -> None:
    """Set the scale, ticks, label and lower end of an axis.

    Args:
        axes: The chart.
        direction: Direction of the axis.
        axis: Description of the axis.
        values: Values that are drawn along the axis.
    """
    from matplotlib.ticker import FuncFormatter

    unit = axis_unit(axis, _largest(values))
    is_x = direction == "x"
    if axis.log is not None:
        set_scale = axes.set_xscale if is_x else axes.set_yscale
        set_scale("log", base=axis.log)
    # matplotlib types no method that is common to both.
    drawn_axis: Any = axes.xaxis if is_x else axes.yaxis
    _set_ticks(drawn_axis, axis, values, unit)
    drawn_axis.set_major_formatter(
        FuncFormatter(lambda value, position: unit.format(value))
    )
    label = name_in_chart(axis.label)
    if unit.name:
        label += f" ({unit.name})"
    drawn_axis.set_label_text(label)
    if axis.low is not None:
        set_limit = axes.set_xlim if is_x else axes.set_ylim
        set_limit(axis.low)


def _largest(values: list[float]) -> float:
    """Return the largest value; 1 for a chart without values."""
    return max(values) if values else 1.0


def _set_ticks(
    drawn_axis: Any, axis: Axis, values: list[float], unit: AxisUnit
) -> None:
    """Set ticks at the axis's own positions, or where its scale and unit need them."""
    from matplotlib.ticker import (
        FixedLocator,
        LogLocator,
        MaxNLocator,
        MultipleLocator,
        NullFormatter,
    )

    if axis.ticks:
        drawn_axis.set_major_locator(FixedLocator(_ticks_apart(axis)))
        drawn_axis.minorticks_off()
    elif axis.log is not None:
        has_ticks_between = axis.log == 10 and _is_narrow(values)
        factors = (1.0, 2.0, 5.0) if has_ticks_between else (1.0,)
        drawn_axis.set_major_locator(LogLocator(base=axis.log, subs=factors))
        drawn_axis.set_minor_formatter(NullFormatter())
    elif axis.unit == "bytes":
        step = _byte_step(_largest(values) / unit.size)
        drawn_axis.set_major_locator(MultipleLocator(unit.size * step))
    else:
        drawn_axis.set_major_locator(
            MaxNLocator(nbins=_MAX_LINEAR_INTERVALS, integer=axis.unit == "count")
        )


def _is_narrow(values: list[float]) -> bool:
    """Return whether the values span so little that powers of ten are too few ticks."""
    if not values:
        return False
    return max(values) / max(min(values), _TINY) < _NARROW_RANGE


def _byte_step(units: float) -> float:
    """Return the step between ticks, in units, of an axis that is ``units`` long."""
    for step in _BYTE_STEPS:
        if units / step <= _MAX_BYTE_TICKS:
            return step
    return units / _MAX_BYTE_TICKS


def _ticks_apart(axis: Axis) -> list[float]:
    """Return those ticks of an axis whose labels do not touch, the largest first.

    The largest tick stays. A smaller one stays if it is far enough from the next larger
    one that stays.
    """
    positions = {
        tick: math.log(max(tick, _TINY)) if axis.log else tick for tick in axis.ticks
    }
    min_distance = (max(positions.values()) - min(positions.values())) / _MAX_LABELS
    kept: list[float] = []
    for tick in sorted(axis.ticks, reverse=True):
        if not kept or positions[kept[-1]] - positions[tick] >= min_distance:
            kept.append(tick)
    return kept


def name_bars(axes: "Axes", labels: list[str]) -> None:
    """Set the names of the bars, the first one on top."""
    axes.set_yticks(range(len(labels)), [name_in_chart(label) for label in labels])
    # Bars are at 0, 1 and so on; with the larger end first, the first bar is on top.
    axes.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def name_in_chart(text: str) -> str:
    """Return the text as one short line without control characters."""
    line = printable_line(text)
    if len(line) <= _MAX_NAME_CHARACTERS:
        return line
    return line[: _MAX_NAME_CHARACTERS - 1] + "…"
