"""Charts drawn with matplotlib, each as high as it needs."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.base.chart_axes import axis_unit, name_bars, name_in_chart, scale_axis
from autotune.base.document import (
    Bar,
    BarChart,
    Drawing,
    Histogram,
    Line,
    LineChart,
    Point,
    ReferenceLine,
    StackedBarChart,
)

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
_LEGEND_COLUMNS = 3
_LEGEND_ROW_INCHES = 0.24
"""Height of a row of the legend."""
_LONG_NAME_CHARACTERS = 20
"""Length of a name above which a small chart has one column less in its legend."""
_SMALL_FONT_POINTS = 8.5
_BAR_HEIGHT = 0.62
"""Share of the distance between two bars that a bar fills."""
_ROOM_FOR_LABEL_SHARE = 0.07
"""Share of the longest bar below which a part shows no figure."""


def figure_of(drawing: Drawing, *, small: bool) -> "Figure":
    """Return a figure with the drawing, as high as it needs."""
    from matplotlib.figure import Figure

    # The page scales a chart to its width: smaller figures get larger letters.
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
    legend_rows = math.ceil(len(labels) / columns)
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
            label=name_in_chart(shade.label),
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
            label=name_in_chart(rule.label),
        )
    scale_axis(axes, "x", drawing.x, [point.x for point in drawn_points])
    scale_axis(axes, "y", drawing.y, [point.y for point in drawn_points])
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
    name = name_in_chart(line.name)
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
            name_in_chart(bar.value_text),
            va="center",
            fontsize=_SMALL_FONT_POINTS,
        )
    scale_axis(axes, "x", drawing.axis, [longest])
    axes.set_xlim(0, 1.22 * longest)  # room for the text behind the longest bar
    name_bars(axes, [bar.label for bar in drawing.bars])


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
    unit = axis_unit(drawing.axis, longest)
    scale_axis(axes, "x", drawing.axis, [longest])
    for segment in segments:
        _draw_segment(axes, segment)
        if segment.size >= _ROOM_FOR_LABEL_SHARE * longest:
            _write_in_segment(axes, segment, unit.format(segment.size))
    _draw_vertical_rules(axes, drawing.rules)
    axes.set_xlim(0, 1.03 * longest)
    name_bars(axes, [stack.label for stack in drawing.stacks])


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
        label=name_in_chart(segment.name) if segment.is_in_legend else "",
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
    scale_axis(axes, "x", drawing.x, ends)
    scale_axis(axes, "y", drawing.y, heights)


def _draw_vertical_rules(axes: "Axes", rules: tuple[ReferenceLine, ...]) -> None:
    styles = ("--", ":", "-.")
    for index, rule in enumerate(rules):
        axes.axvline(
            rule.value,
            color=INK,
            linewidth=1.0,
            linestyle=styles[index % len(styles)],
            label=name_in_chart(rule.label),
        )
