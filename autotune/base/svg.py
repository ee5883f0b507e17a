"""Charts as static SVG for a page that allows no script, no style attribute and no external resource."""

import io
import math
import re
import warnings
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from autotune.base.document import (
    Axis,
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
_MOST_LETTERS, _FEW = 44, 4
_LEGEND_COLUMNS, _LEGEND_ROW_INCHES, _LONG_NAME_LETTERS = 3, 0.24, 20
_SMALL = 8.5
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Steps between ticks on an axis of bytes, in its unit."""
_ROOM_FOR_LABEL_SHARE = 0.07
"""Share of the longest bar below which a part shows no figure."""
_DARK = (COLOURS[0], COLOURS[2], COLOURS[5])
"""Colours on which white text is easier to read than black."""
_SVG = "http://www.w3.org/2000/svg"
_FRACTION = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "svg.hashsalt": "autotune",  # the same drawing has the same bytes
    "font.family": "sans-serif",
    "font.size": 9.5,
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "xtick.color",
            "ytick.color",
        ),
        INK,
    ),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    "axes.linewidth": 0.6,
    "text.parse_math": False,  # a dollar is a dollar
}


def drawn(
    drawing: Drawing, *, key: str, title: str, description: str, small: bool = False
) -> str:
    """Return an ``<svg>`` element with a title and description for screen readers.

    ``key`` is the prefix of its ids.
    """
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # Of letters its own font lacks, and of figures too odd to be drawn well.
        warnings.simplefilter("ignore")
        svg = io.StringIO()
        _figure_of(drawing, small=small).savefig(svg, format="svg")
    root = ElementTree.fromstring(svg.getvalue())
    _plain(root, key)
    for place, (name, text) in enumerate((("title", title), ("desc", description))):
        words = ElementTree.Element(f"{{{_SVG}}}{name}", {"id": f"{key}-{name}"})
        words.text = printable_line(text)
        root.insert(place, words)
    root.attrib |= {"role": "img", "aria-labelledby": f"{key}-title {key}-desc"}
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _plain(root: ElementTree.Element, key: str) -> None:
    """Turn styles into attributes; drop metadata, blanks and invisible digits.

    Prefix ids with ``key``.
    """
    for parent in list(root.iter()):
        parent[:] = [
            child
            for child in parent
            if child.tag not in {f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"}
        ]
    for element in root.iter():
        said = dict(element.attrib)
        element.attrib.clear()
        for part in filter(None, said.pop("style", "").split(";")):
            name, _, value = part.partition(":")
            said[name.strip()] = value.strip()
        if element.tag == f"{{{_SVG}}}text":
            said.setdefault("fill", INK)
            font = said.pop("font", None) or said["font-size"]
            said["font-size"] = re.findall(r"([\d.]+)px", font)[0]
            said.pop("font-family", None)
        if element.tag == f"{{{_SVG}}}g":
            said.pop("id", None)  # nothing refers to these
        for name, value in said.items():
            short = _FRACTION.sub(
                lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value
            )
            plain = "currentColor" if value.lower() == INK else short
            if name == "id" or name.endswith("href"):
                plain = f"{'#' * (name != 'id')}{key}-{value.removeprefix('#')}"
            element.set(name.rpartition("}")[2], plain.replace("url(#", f"url(#{key}-"))
        element.text = element.text if element.text and element.text.strip() else None
        element.tail = element.tail if element.tail and element.tail.strip() else None
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)  # as wide as its container
    root.attrib |= {
        "stroke-linejoin": "round",
        "stroke-linecap": "butt",
        "font-family": "sans-serif",
    }


def _figure_of(drawing: Drawing, *, small: bool) -> "Figure":
    """Return a figure with the drawing, as high as it needs."""
    from matplotlib.figure import Figure

    bar_inches, around_inches = (0.27, 0.4) if small else (0.42, 0.75)
    figure = Figure(figsize=(4.8 if small else 6.6, 3.6), layout="constrained")
    axes = figure.subplots()
    match drawing:
        case LineChart():
            _lines(axes, drawing)
        case BarChart():
            figure.set_figheight(around_inches + bar_inches * len(drawing.bars))
            _bars(axes, drawing)
        case StackedBarChart():
            figure.set_figheight(around_inches + 1.2 * bar_inches * len(drawing.stacks))
            _stacks(axes, drawing)
        case Histogram():
            _columns(axes, drawing)
    handles, labels = axes.get_legend_handles_labels()
    if labels:  # below the chart, where it covers nothing
        columns = _LEGEND_COLUMNS - (
            small and max(map(len, labels)) > _LONG_NAME_LETTERS
        )
        figure.set_figheight(
            figure.get_figheight() + _LEGEND_ROW_INCHES * -(-len(labels) // columns)
        )
        figure.legend(
            handles, labels, loc="outside lower left", ncols=columns, fontsize=_SMALL
        )
    return figure


def _lines(axes: "Axes", drawing: LineChart) -> None:
    if shade := drawing.shade:
        label = _name_in_chart(shade.label)
        axes.axvspan(
            shade.start,
            shade.end,
            color=COLOURS[7],
            alpha=0.22,
            linewidth=0,
            label=label,
        )
    points: list[Point] = []
    for line in drawing.lines:
        drawn_points = [
            point for point in line.points if math.isfinite(point.x + point.y)
        ]
        _line(axes, line, drawn_points)
        points += drawn_points
    for rule in drawing.rules:
        axes.axhline(
            rule.value,
            color=INK,
            linewidth=0.7,
            linestyle="--",
            label=_name_in_chart(rule.label),
        )
    _scale(axes, "x", drawing.x, [point.x for point in points])
    _scale(axes, "y", drawing.y, [point.y for point in points])
    axes.grid(visible=True, which="major", linewidth=0.3, color=INK, alpha=0.25)


def _line(axes: "Axes", line: Line, points: list[Point]) -> None:
    x, y = [point.x for point in points], [point.y for point in points]
    colour = COLOURS[line.colour % len(COLOURS)]
    if line.kind == "dotted":
        axes.plot(x, y, color=colour, linewidth=0.8, linestyle=":")
        return
    name = _name_in_chart(line.name)
    ends = [
        (point.x, point.low, point.high)
        for point in points
        if point.low is not None and point.high is not None
    ]
    bounded = [one for one in ends if math.isfinite(sum(one))]
    places, lows, highs = ([one[side] for one in bounded] for side in range(3))
    if line.kind == "line":
        axes.plot(x, y, color=colour, linewidth=1.4, label=name)
        axes.fill_between(places, lows, highs, color=colour, alpha=0.18, linewidth=0)
    else:
        style = "-" if line.kind == "joined" else "none"
        axes.plot(
            x,
            y,
            color=colour,
            linewidth=1.2,
            linestyle=style,
            marker="o",
            markersize=4,
            label=name,
        )
        axes.vlines(places, lows, highs, color=colour, linewidth=1.0)


def _bars(axes: "Axes", drawing: BarChart) -> None:
    most = max((bar.high or bar.value for bar in drawing.bars), default=0.0) or 1.0
    for place, bar in enumerate(drawing.bars):
        axes.barh(
            place,
            bar.value,
            height=0.62,
            color=COLOURS[place % len(COLOURS)],
            linewidth=0,
        )
        if bar.low is not None and bar.high is not None:
            axes.plot(
                [bar.low, bar.high],
                [place, place],
                color=INK,
                linewidth=1.2,
                marker="|",
                markersize=7,
            )
        end = max(bar.value, bar.high or bar.value)
        axes.text(
            end + 0.015 * most,
            place,
            _name_in_chart(bar.value_text),
            va="center",
            fontsize=_SMALL,
        )
    _scale(axes, "x", drawing.axis, [most])
    axes.set_xlim(0, 1.22 * most)
    _listed(axes, [bar.label for bar in drawing.bars])


def _stacks(axes: "Axes", drawing: StackedBarChart) -> None:
    stacks = [
        [(name, size) for name, size in stack.parts if math.isfinite(size)]
        for stack in drawing.stacks
    ]
    names = list(dict.fromkeys(name for parts in stacks for name, _ in parts))
    ends = [
        *(sum(size for _, size in parts) for parts in stacks),
        *(rule.value for rule in drawing.rules),
    ]
    most = max(ends, default=0.0) or 1.0
    _scale(axes, "x", drawing.axis, [most])
    shown = set()
    for place, parts in enumerate(stacks):
        left = 0.0
        for name, size in parts:
            colour = COLOURS[names.index(name) % len(COLOURS)]
            label = "" if name in shown else _name_in_chart(name)
            shown.add(name)
            axes.barh(
                place,
                size,
                left=left,
                height=0.62,
                color=colour,
                linewidth=0,
                label=label,
            )
            if size >= _ROOM_FOR_LABEL_SHARE * most:
                text = _tick_text(size, drawing.axis.unit, _byte_unit(most)[1])
                ink = "#ffffff" if colour in _DARK else "#111111"
                axes.text(
                    left + size / 2,
                    place,
                    text,
                    ha="center",
                    va="center",
                    fontsize=_SMALL,
                    color=ink,
                )
            left += size
    _upright(axes, drawing.rules)
    axes.set_xlim(0, 1.03 * most)
    _listed(axes, [stack.label for stack in drawing.stacks])


def _columns(axes: "Axes", drawing: Histogram) -> None:
    starts = [bin.start for bin in drawing.bins]
    ends = [bin.end for bin in drawing.bins]
    heights = [bin.height for bin in drawing.bins]
    widths = [bin.end - bin.start for bin in drawing.bins]
    axes.bar(starts, heights, width=widths, align="edge", color=COLOURS[0], linewidth=0)
    _upright(axes, drawing.rules)
    _scale(axes, "x", drawing.x, ends)
    _scale(axes, "y", drawing.y, heights)


def _upright(axes: "Axes", rules: tuple[ReferenceLine, ...]) -> None:
    for rule, style in zip(rules, ("--", ":", "-.") * len(rules), strict=False):
        axes.axvline(
            rule.value,
            color=INK,
            linewidth=1.0,
            linestyle=style,
            label=_name_in_chart(rule.label),
        )


def _scale(axes: "Axes", which: str, axis: Axis, values: list[float]) -> None:
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        MultipleLocator,
        NullFormatter,
    )

    side: Any = getattr(axes, f"{which}axis")
    most = max(values, default=1.0)
    name, size = _byte_unit(most) if axis.unit == "bytes" else ("", 1)
    if axis.log is not None:
        getattr(axes, f"set_{which}scale")("log", base=axis.log)
    if axis.ticks:
        side.set_major_locator(FixedLocator(_apart(axis)))
        side.minorticks_off()
    elif axis.log is not None:
        near = max(values) / max(min(values), 1e-300) < 30 if values else False
        side.set_major_locator(
            LogLocator(
                base=axis.log,
                subs=(1.0, 2.0, 5.0) if near and axis.log == 10 else (1.0,),
            )
        )
        side.set_minor_formatter(NullFormatter())
    elif axis.unit == "bytes":
        step = next((one for one in _STEPS if most / size / one <= 8), most / size / 8)
        side.set_major_locator(MultipleLocator(size * step))
    else:
        side.set_major_locator(MaxNLocator(nbins=6, integer=axis.unit == "count"))
    side.set_major_formatter(
        FuncFormatter(lambda value, _: _tick_text(value, axis.unit, size))
    )
    side.set_label_text(_name_in_chart(axis.label) + (f" ({name})" if name else ""))
    if axis.low is not None:
        getattr(axes, f"set_{which}lim")(axis.low)


def _apart(axis: Axis) -> list[float]:
    """Return the ticks without those whose labels would touch the next one's.

    The last always stays.
    """
    places = {
        tick: math.log(max(tick, 1e-300)) if axis.log else tick for tick in axis.ticks
    }
    least = (max(places.values()) - min(places.values())) / 24
    kept: list[float] = []
    for tick in sorted(axis.ticks, reverse=True):
        if not kept or places[kept[-1]] - places[tick] >= least:
            kept.append(tick)
    return kept


def _listed(axes: "Axes", labels: list[str]) -> None:
    """Set the names of the bars, the first one on top."""
    axes.set_yticks(range(len(labels)), [_name_in_chart(label) for label in labels])
    axes.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _name_in_chart(text: str) -> str:
    """Return the text as one short line without control characters."""
    plain = printable_line(text)
    return plain if len(plain) <= _MOST_LETTERS else plain[: _MOST_LETTERS - 1] + "…"


def _byte_unit(most_bytes: float) -> tuple[str, int]:
    """Return the largest binary unit of which there are a few, so that parts are not all fractions, and its bytes."""
    return next(
        (unit for unit in BYTE_UNITS if most_bytes >= _FEW * unit[1]), BYTE_UNITS[-1]
    )


def _tick_text(value: float, unit: Unit, bytes_per_unit: int = 1) -> str:
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        shown = value / bytes_per_unit
        return f"{shown:.3g}" if abs(shown) < 1000 else format_count(shown)
    return (
        format_count(value)
        if unit == "count" and value == round(value)
        else f"{value:.4g}"
    )
