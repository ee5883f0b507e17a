"""Charts as static SVG.

The page that holds them allows no script, no style attribute and no external resource.
"""

import io
import math
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from autotune.base.document import (
    Axis,
    Bar,
    BarChart,
    Drawing,
    Histogram,
    Line,
    LineChart,
    Point,
    ReferenceLine,
    StackedBarChart,
    Unit,
)
from autotune.base.tables import printable_line
from autotune.base.units import BYTE_UNITS, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
"""Placeholder that is replaced by the colour of the page's text."""
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#8c8c8c",
)
"""Palette for readers with colour-vision deficiency (Okabe and Ito 2008), and a
grey."""
_GREY = COLOURS[7]
_DARK = (COLOURS[0], COLOURS[2], COLOURS[5])
"""Colours on which white text is easier to read than black."""
_MAX_NAME_CHARACTERS = 44
_MIN_UNITS = 4
"""Fewest units of which the longest bar of an axis in bytes has, so that its parts are
not all fractions."""
_LEGEND_COLUMNS = 3
_LEGEND_ROW_INCHES = 0.24
_LONG_NAME_CHARACTERS = 20
"""Length of a name above which a small chart has one column less in its legend."""
_SMALL_FONT_POINTS = 8.5
_BAR_HEIGHT = 0.62
"""Share of the distance between two bars that a bar fills."""
_BYTE_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Steps between ticks on an axis of bytes, in its unit."""
_MAX_BYTE_TICKS = 8
_MAX_LABELS = 24
"""Number of labels that fit beside each other below a chart."""
_NARROW_RANGE = 30
"""Ratio of the largest to the smallest value below which a decimal logarithmic axis
has ticks between powers of ten."""
_ROOM_FOR_LABEL_SHARE = 0.07
"""Share of the longest bar below which a part shows no figure."""
_TINY = 1e-300
"""Stands for 0 on a logarithmic axis."""
_SVG = "http://www.w3.org/2000/svg"
_FRACTION = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "svg.hashsalt": "autotune",  # the same drawing has the same bytes
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "text.parse_math": False,  # a dollar is a dollar
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def render_svg(
    drawing: Drawing, *, key: str, title: str, description: str, small: bool = False
) -> str:
    """Return an ``<svg>`` element with a title and description for screen readers.

    Args:
        drawing: What to draw.
        key: Prefix of the element's ids.
        title: Title of the chart.
        description: Description for readers who cannot see the chart.
        small: True if the chart is made for half the width.
    """
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # matplotlib warns of letters that its own font lacks, and of figures too odd to
        # be drawn well.
        warnings.simplefilter("ignore")
        svg = io.StringIO()
        _figure_of(drawing, small=small).savefig(svg, format="svg")
    root = ElementTree.fromstring(svg.getvalue())
    _simplify(root, key)
    for index, (name, text) in enumerate((("title", title), ("desc", description))):
        label = ElementTree.Element(f"{{{_SVG}}}{name}", {"id": f"{key}-{name}"})
        label.text = printable_line(text)
        root.insert(index, label)
    root.attrib |= {"role": "img", "aria-labelledby": f"{key}-title {key}-desc"}
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _simplify(root: ElementTree.Element, key: str) -> None:
    """Turn styles into attributes; drop metadata, blanks and invisible digits.

    Prefix ids with ``key``.
    """
    dropped = {f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"}
    for parent in list(root.iter()):
        parent[:] = [child for child in parent if child.tag not in dropped]
    for element in root.iter():
        attributes = _plain_attributes(element)
        element.attrib.clear()
        for name, value in attributes.items():
            # Attributes of other namespaces, such as xlink, lose theirs.
            short_name = name.rpartition("}")[2]
            element.set(short_name, _plain_value(name, value, key))
        element.text = _none_if_blank(element.text)
        element.tail = _none_if_blank(element.tail)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)  # as wide as its container
    root.attrib |= {
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
        "font-family": "sans-serif",
    }


def _plain_attributes(element: ElementTree.Element) -> dict[str, str]:
    """Return the attributes of an element, with those of its style among them."""
    attributes = dict(element.attrib)
    for declaration in attributes.pop("style", "").split(";"):
        if declaration:
            name, _, value = declaration.partition(":")
            attributes[name.strip()] = value.strip()
    if element.tag == f"{{{_SVG}}}text":
        attributes.setdefault("fill", INK)
        font = attributes.pop("font", None) or attributes["font-size"]
        attributes["font-size"] = re.findall(r"([\d.]+)px", font)[0]
        attributes.pop("font-family", None)
    if element.tag == f"{{{_SVG}}}g":
        attributes.pop("id", None)  # nothing refers to these
    return attributes


def _plain_value(name: str, value: str, key: str) -> str:
    """Return an attribute's value with two decimals, and ids prefixed with ``key``."""
    if name == "id":
        return f"{key}-{value}"
    if name.endswith("href"):
        return f"#{key}-{value.removeprefix('#')}"
    if value.lower() == INK:
        return "currentColor"
    return _FRACTION.sub(_two_decimals, value).replace("url(#", f"url(#{key}-")


def _two_decimals(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _none_if_blank(text: str | None) -> str | None:
    return text if text and text.strip() else None


def _figure_of(drawing: Drawing, *, small: bool) -> "Figure":
    """Return a figure with the drawing, as high as it needs."""
    from matplotlib.figure import Figure

    width_inches = 4.8 if small else 6.6
    bar_inches = 0.27 if small else 0.42
    margin_inches = 0.4 if small else 0.75
    figure = Figure(figsize=(width_inches, 3.6), layout="constrained")
    axes = figure.subplots()
    match drawing:
        case LineChart():
            _draw_line_chart(axes, drawing)
        case BarChart():
            figure.set_figheight(margin_inches + bar_inches * len(drawing.bars))
            _draw_bars(axes, drawing)
        case StackedBarChart():
            figure.set_figheight(margin_inches + 1.2 * bar_inches * len(drawing.stacks))
            _draw_stacks(axes, drawing)
        case Histogram():
            _draw_histogram(axes, drawing)
    _add_legend(figure, axes, small=small)
    return figure


def _add_legend(figure: "Figure", axes: "Axes", *, small: bool) -> None:
    """Add a legend below the chart, where it covers nothing, if anything has a name."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    columns = _LEGEND_COLUMNS
    if small and max(map(len, labels)) > _LONG_NAME_CHARACTERS:
        columns -= 1
    legend_rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_INCHES * legend_rows)
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=columns,
        fontsize=_SMALL_FONT_POINTS,
    )


def _draw_line_chart(axes: "Axes", drawing: LineChart) -> None:
    shade = drawing.shade
    if shade is not None:
        axes.axvspan(
            shade.start,
            shade.end,
            color=_GREY,
            alpha=0.22,
            linewidth=0,
            label=_name_in_chart(shade.label),
        )
    drawn_points: list[Point] = []
    for line in drawing.lines:
        points = [point for point in line.points if math.isfinite(point.x + point.y)]
        _draw_line(axes, line, points)
        drawn_points += points
    for rule in drawing.rules:
        axes.axhline(
            rule.value,
            color=INK,
            linewidth=0.7,
            linestyle="--",
            label=_name_in_chart(rule.label),
        )
    _scale_axis(axes, "x", drawing.x, [point.x for point in drawn_points])
    _scale_axis(axes, "y", drawing.y, [point.y for point in drawn_points])
    axes.grid(visible=True, which="major", linewidth=0.3, color=INK, alpha=0.25)


def _draw_line(axes: "Axes", line: Line, points: list[Point]) -> None:
    x = [point.x for point in points]
    y = [point.y for point in points]
    colour = COLOURS[line.colour % len(COLOURS)]
    if line.kind == "dotted":
        axes.plot(x, y, color=colour, linewidth=0.8, linestyle=":")
        return
    bounded_x: list[float] = []
    lows: list[float] = []
    highs: list[float] = []
    for point in points:
        if point.low is None or point.high is None:
            continue
        if math.isfinite(point.x + point.low + point.high):
            bounded_x.append(point.x)
            lows.append(point.low)
            highs.append(point.high)
    name = _name_in_chart(line.name)
    if line.kind == "line":
        axes.plot(x, y, color=colour, linewidth=1.4, label=name)
        axes.fill_between(bounded_x, lows, highs, color=colour, alpha=0.18, linewidth=0)
    else:
        axes.plot(
            x,
            y,
            color=colour,
            linewidth=1.2,
            linestyle="-" if line.kind == "joined" else "none",
            marker="o",
            markersize=4,
            label=name,
        )
        axes.vlines(bounded_x, lows, highs, color=colour, linewidth=1.0)


def _draw_bars(axes: "Axes", drawing: BarChart) -> None:
    longest = max((_end_of_bar(bar) for bar in drawing.bars), default=0.0)
    if longest == 0:
        longest = 1.0  # an axis needs a length
    for index, bar in enumerate(drawing.bars):
        axes.barh(
            index,
            bar.value,
            height=_BAR_HEIGHT,
            color=COLOURS[index % len(COLOURS)],
            linewidth=0,
        )
        if bar.low is not None and bar.high is not None:
            axes.plot(
                [bar.low, bar.high],
                [index, index],
                color=INK,
                linewidth=1.2,
                marker="|",
                markersize=7,
            )
        axes.text(
            _end_of_bar(bar) + 0.015 * longest,
            index,
            _name_in_chart(bar.value_text),
            va="center",
            fontsize=_SMALL_FONT_POINTS,
        )
    _scale_axis(axes, "x", drawing.axis, [longest])
    axes.set_xlim(0, 1.22 * longest)  # room for the text behind the longest bar
    _name_bars(axes, [bar.label for bar in drawing.bars])


def _end_of_bar(bar: Bar) -> float:
    return bar.value if bar.high is None else max(bar.value, bar.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """One coloured part of a stacked bar."""

    name: str
    row: int
    """Number of its bar."""
    start: float
    size: float
    colour: str
    is_in_legend: bool
    """True for the first segment of its name."""


def _draw_stacks(axes: "Axes", drawing: StackedBarChart) -> None:
    segments = _segments(drawing)
    ends = [segment.start + segment.size for segment in segments]
    ends += [rule.value for rule in drawing.rules]
    longest = max(ends, default=0.0)
    if longest == 0:
        longest = 1.0  # an axis needs a length
    _, bytes_per_unit = _byte_unit(longest)
    _scale_axis(axes, "x", drawing.axis, [longest])
    for segment in segments:
        _draw_segment(axes, segment)
        if segment.size >= _ROOM_FOR_LABEL_SHARE * longest:
            size_text = _tick_text(segment.size, drawing.axis.unit, bytes_per_unit)
            _write_in_segment(axes, segment, size_text)
    _draw_vertical_rules(axes, drawing.rules)
    axes.set_xlim(0, 1.03 * longest)
    _name_bars(axes, [stack.label for stack in drawing.stacks])


def _segments(drawing: StackedBarChart) -> list[_Segment]:
    """Return the parts that have a size; parts of one name share a colour."""
    segments: list[_Segment] = []
    colours: dict[str, str] = {}
    for row, stack in enumerate(drawing.stacks):
        start = 0.0
        for name, size in stack.parts:
            if not math.isfinite(size):
                continue
            is_new = name not in colours
            if is_new:
                colours[name] = COLOURS[len(colours) % len(COLOURS)]
            segment = _Segment(
                name=name,
                row=row,
                start=start,
                size=size,
                colour=colours[name],
                is_in_legend=is_new,
            )
            segments.append(segment)
            start += size
    return segments


def _draw_segment(axes: "Axes", segment: _Segment) -> None:
    axes.barh(
        segment.row,
        segment.size,
        left=segment.start,
        height=_BAR_HEIGHT,
        color=segment.colour,
        linewidth=0,
        label=_name_in_chart(segment.name) if segment.is_in_legend else "",
    )


def _write_in_segment(axes: "Axes", segment: _Segment, text: str) -> None:
    axes.text(
        segment.start + segment.size / 2,
        segment.row,
        text,
        ha="center",
        va="center",
        fontsize=_SMALL_FONT_POINTS,
        color="#ffffff" if segment.colour in _DARK else "#111111",
    )


def _draw_histogram(axes: "Axes", drawing: Histogram) -> None:
    starts = [bin.start for bin in drawing.bins]
    ends = [bin.end for bin in drawing.bins]
    heights = [bin.height for bin in drawing.bins]
    widths = [bin.end - bin.start for bin in drawing.bins]
    axes.bar(starts, heights, width=widths, align="edge", color=COLOURS[0], linewidth=0)
    _draw_vertical_rules(axes, drawing.rules)
    _scale_axis(axes, "x", drawing.x, ends)
    _scale_axis(axes, "y", drawing.y, heights)


def _draw_vertical_rules(axes: "Axes", rules: tuple[ReferenceLine, ...]) -> None:
    styles = ("--", ":", "-.")
    for index, rule in enumerate(rules):
        axes.axvline(
            rule.value,
            color=INK,
            linewidth=1.0,
            linestyle=styles[index % len(styles)],
            label=_name_in_chart(rule.label),
        )


def _scale_axis(
    axes: "Axes", direction: Literal["x", "y"], axis: Axis, values: list[float]
) -> None:
    """Set the scale, ticks, label and lower end of an axis with these values."""
    from matplotlib.ticker import FuncFormatter

    largest = max(values, default=1.0)
    unit_name, bytes_per_unit = "", 1
    if axis.unit == "bytes":
        unit_name, bytes_per_unit = _byte_unit(largest)
    if axis.log is not None:
        getattr(axes, f"set_{direction}scale")("log", base=axis.log)
    drawn_axis: Any = getattr(axes, f"{direction}axis")
    _set_ticks(drawn_axis, axis, values, bytes_per_unit)
    drawn_axis.set_major_formatter(
        FuncFormatter(lambda value, _: _tick_text(value, axis.unit, bytes_per_unit))
    )
    label = _name_in_chart(axis.label)
    drawn_axis.set_label_text(f"{label} ({unit_name})" if unit_name else label)
    if axis.low is not None:
        getattr(axes, f"set_{direction}lim")(axis.low)


def _set_ticks(
    drawn_axis: Any, axis: Axis, values: list[float], bytes_per_unit: int
) -> None:
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
        is_narrow = bool(values) and (
            max(values) / max(min(values), _TINY) < _NARROW_RANGE
        )
        factors = (1.0, 2.0, 5.0) if is_narrow and axis.log == 10 else (1.0,)
        drawn_axis.set_major_locator(LogLocator(base=axis.log, subs=factors))
        drawn_axis.set_minor_formatter(NullFormatter())
    elif axis.unit == "bytes":
        units = max(values, default=1.0) / bytes_per_unit
        step = next(
            (step for step in _BYTE_STEPS if units / step <= _MAX_BYTE_TICKS),
            units / _MAX_BYTE_TICKS,
        )
        drawn_axis.set_major_locator(MultipleLocator(bytes_per_unit * step))
    else:
        drawn_axis.set_major_locator(MaxNLocator(nbins=6, integer=axis.unit == "count"))


def _ticks_apart(axis: Axis) -> list[float]:
    """Return the ticks without those whose labels would touch the next one's.

    The last always stays.
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


def _name_bars(axes: "Axes", labels: list[str]) -> None:
    """Set the names of the bars, the first one on top."""
    axes.set_yticks(range(len(labels)), [_name_in_chart(label) for label in labels])
    axes.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _name_in_chart(text: str) -> str:
    """Return the text as one short line without control characters."""
    line = printable_line(text)
    if len(line) <= _MAX_NAME_CHARACTERS:
        return line
    return line[: _MAX_NAME_CHARACTERS - 1] + "…"


def _byte_unit(largest_bytes: float) -> tuple[str, int]:
    """Return the unit of an axis of bytes: its name, and its bytes."""
    for name, unit_bytes in BYTE_UNITS:
        if largest_bytes >= _MIN_UNITS * unit_bytes:
            return name, unit_bytes
    return BYTE_UNITS[-1]


def _tick_text(value: float, unit: Unit, bytes_per_unit: int = 1) -> str:
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        units = value / bytes_per_unit
        return f"{units:.3g}" if abs(units) < 1000 else format_count(units)
    if unit == "count" and value == round(value):
        return format_count(value)
    return f"{value:.4g}"
