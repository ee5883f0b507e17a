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

# Palette for readers with colour-vision deficiency (Okabe and Ito 2008), and a grey.
_BLUE = "#0072b2"
_ORANGE = "#e69f00"
_GREEN = "#009e73"
_PURPLE = "#cc79a7"
_SKY_BLUE = "#56b4e9"
_VERMILION = "#d55e00"
_YELLOW = "#f0e442"
_GREY = "#8c8c8c"
COLOURS = (
    _BLUE,
    _ORANGE,
    _GREEN,
    _PURPLE,
    _SKY_BLUE,
    _VERMILION,
    _YELLOW,
    _GREY,
)
"""Colours of lines, bars and parts, in the order in which they are used."""
_DARK_COLOURS = (_BLUE, _GREEN, _VERMILION)
"""Colours on which white text is easier to read than black."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChartSize:
    """Size of a chart, in inches before the page scales it to its own width."""

    width_inches: float
    margin_inches: float
    """Height of a bar chart beside its bars: the axis with its label."""
    bar_inches: float
    """Height for each bar of a bar chart, with the gap to the next one."""


# The page scales both widths to the room that it has for them: a figure of fewer inches
# is enlarged more, and its letters with it.
_FULL_SIZE = _ChartSize(width_inches=6.6, margin_inches=0.75, bar_inches=0.42)
_SMALL_SIZE = _ChartSize(width_inches=4.8, margin_inches=0.4, bar_inches=0.27)
_HEIGHT_INCHES = 3.6
"""Height of a chart without bars, before its legend is added."""
_STACK_TO_BAR_HEIGHT = 1.2
"""Height for a stacked bar relative to a plain one; figures are written into it."""
_LEGEND_COLUMNS = 3
"""Names beside each other in a legend."""
_LEGEND_ROW_INCHES = 0.24
"""Height of a row of the legend."""
_LONG_NAME_CHARACTERS = 20
"""Length of a name above which a small chart has one column less in its legend."""
_SMALL_FONT_POINTS = 8.5
"""Size of letters in the legend, in bars and beside them."""
_BAR_HEIGHT = 0.62
"""Share of the distance between two bars that a bar fills."""
_ROOM_FOR_LABEL_SHARE = 0.07
"""Share of the longest bar below which a part shows no figure."""
_GAP_BEFORE_TEXT_SHARE = 0.015
"""Gap between a bar and the text at its end, as a share of the longest bar."""
_AXIS_LENGTH_OF_BARS = 1.22
"""Length of an axis relative to the longest bar, with room for the text at its end."""
_AXIS_LENGTH_OF_STACKS = 1.03
"""Length of an axis relative to the longest stacked bar, which has no text at its
end."""


def figure_of(drawing: Drawing, *, small: bool) -> "Figure":
    """Return a matplotlib figure with the drawing, as high as it needs.

    Args:
        drawing: The drawing.
        small: True if the chart is made for half the width of the page.
    """
    # Imported here, as matplotlib takes long and only pages with charts need it.
    from matplotlib.figure import Figure

    size = _SMALL_SIZE if small else _FULL_SIZE
    figure = Figure(figsize=(size.width_inches, _HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots()
    match drawing:
        case LineChart():
            _draw_line_chart(axes, drawing)
        case BarChart():
            bars_inches = size.bar_inches * len(drawing.bars)
            figure.set_figheight(size.margin_inches + bars_inches)
            _draw_bars(axes, drawing)
        case StackedBarChart():
            stacks_inches = _STACK_TO_BAR_HEIGHT * size.bar_inches * len(drawing.stacks)
            figure.set_figheight(size.margin_inches + stacks_inches)
            _draw_stacks(axes, drawing)
        case Histogram():
            _draw_histogram(axes, drawing)
    _add_legend(figure, axes, small=small)
    return figure


def _add_legend(figure: "Figure", axes: "Axes", *, small: bool) -> None:
    """Add a legend below the chart if anything in it has a name.

    The figure grows by the legend, so that the drawing keeps its height.
    """
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
    """Draw the shade, the lines and the reference lines, and scale both axes."""
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
    for reference_line in drawing.reference_lines:
        axes.axhline(
            reference_line.value,
            color=INK,
            linewidth=0.7,
            linestyle="--",
            label=name_in_chart(reference_line.label),
        )
    heights = [point.y for point in drawn_points]
    heights += [reference_line.value for reference_line in drawing.reference_lines]
    scale_axis(axes, "x", drawing.x, [point.x for point in drawn_points])
    scale_axis(axes, "y", drawing.y, heights)
    axes.grid(visible=True, which="major", linewidth=0.3, color=INK, alpha=0.25)


def _draw_line(axes: "Axes", line: Line, points: list[Point]) -> None:
    """Draw finite points of a line in its style, with their bounds."""
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
    """Draw the bars with their bounds and texts, and name them."""
    longest = _longest([_end_of_bar(bar) for bar in drawing.bars])
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
            _end_of_bar(bar) + _GAP_BEFORE_TEXT_SHARE * longest,
            index,
            name_in_chart(bar.value_text),
            va="center",
            fontsize=_SMALL_FONT_POINTS,
        )
    scale_axis(axes, "x", drawing.axis, [longest])
    axes.set_xlim(0, _AXIS_LENGTH_OF_BARS * longest)
    name_bars(axes, [bar.label for bar in drawing.bars])


def _end_of_bar(bar: Bar) -> float:
    """Return the highest value that is drawn for a bar, its upper bound included."""
    return bar.value if bar.high is None else max(bar.value, bar.high)


def _longest(ends: list[float]) -> float:
    """Return the largest end of a bar; 1 without bars longer than 0.

    An axis from 0 to 0 could not be drawn.
    """
    longest = max(ends, default=0.0)
    return 1.0 if longest == 0 else longest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """One coloured part of a stacked bar."""

    name: str
    """Name of the part, in the legend."""
    bar_index: int
    """Number of the segment's bar, from the top."""
    start: float
    """Position on the axis at which the segment begins."""
    size: float
    """Length of the segment on the axis."""
    colour: str
    """Colour of all segments of this name."""
    is_in_legend: bool
    """True for the first segment of a name, so that the legend has each name once."""


def _draw_stacks(axes: "Axes", drawing: StackedBarChart) -> None:
    """Draw the stacked bars with figures in them, and name the bars."""
    segments = _segments(drawing)
    ends = [segment.start + segment.size for segment in segments]
    ends += [reference_line.value for reference_line in drawing.reference_lines]
    longest = _longest(ends)
    unit = axis_unit(drawing.axis, longest)
    scale_axis(axes, "x", drawing.axis, [longest])
    for segment in segments:
        _draw_segment(axes, segment)
        if segment.size >= _ROOM_FOR_LABEL_SHARE * longest:
            _write_in_segment(axes, segment, unit.format(segment.size))
    _draw_vertical_lines(axes, drawing.reference_lines)
    axes.set_xlim(0, _AXIS_LENGTH_OF_STACKS * longest)
    name_bars(axes, [stack.label for stack in drawing.stacks])


def _segments(drawing: StackedBarChart) -> list[_Segment]:
    """Return the segments of all bars; those of one name share a colour.

    Parts of infinite size are left out.
    """
    segments: list[_Segment] = []
    colours: dict[str, str] = {}
    for bar_index, stack in enumerate(drawing.stacks):
        start = 0.0
        for name, size in stack.parts:
            if not math.isfinite(size):
                continue
            is_new = name not in colours
            if is_new:
                colours[name] = COLOURS[len(colours) % len(COLOURS)]
            segment = _Segment(
                name=name,
                bar_index=bar_index,
                start=start,
                size=size,
                colour=colours[name],
                is_in_legend=is_new,
            )
            segments.append(segment)
            start += size
    return segments


def _draw_segment(axes: "Axes", segment: _Segment) -> None:
    """Draw a segment, and name it in the legend if it is the first of its name."""
    axes.barh(
        segment.bar_index,
        segment.size,
        left=segment.start,
        height=_BAR_HEIGHT,
        color=segment.colour,
        linewidth=0,
        label=name_in_chart(segment.name) if segment.is_in_legend else "",
    )


def _write_in_segment(axes: "Axes", segment: _Segment, text: str) -> None:
    """Write a text in the middle of a segment, in a colour that can be read there."""
    axes.text(
        segment.start + segment.size / 2,
        segment.bar_index,
        text,
        ha="center",
        va="center",
        fontsize=_SMALL_FONT_POINTS,
        color="#ffffff" if segment.colour in _DARK_COLOURS else "#111111",
    )


def _draw_histogram(axes: "Axes", drawing: Histogram) -> None:
    """Draw the bars and the reference lines, and scale both axes."""
    starts = [drawn_bin.start for drawn_bin in drawing.bins]
    ends = [drawn_bin.end for drawn_bin in drawing.bins]
    heights = [drawn_bin.height for drawn_bin in drawing.bins]
    widths = [drawn_bin.end - drawn_bin.start for drawn_bin in drawing.bins]
    axes.bar(starts, heights, width=widths, align="edge", color=_BLUE, linewidth=0)
    _draw_vertical_lines(axes, drawing.reference_lines)
    ends += [reference_line.value for reference_line in drawing.reference_lines]
    scale_axis(axes, "x", drawing.x, ends)
    scale_axis(axes, "y", drawing.y, heights)


def _draw_vertical_lines(
    axes: "Axes", reference_lines: tuple[ReferenceLine, ...]
) -> None:
    """Draw reference lines across the chart, each in another style."""
    styles = ("--", ":", "-.")
    for index, reference_line in enumerate(reference_lines):
        axes.axvline(
            reference_line.value,
            color=INK,
            linewidth=1.0,
            linestyle=styles[index % len(styles)],
            label=name_in_chart(reference_line.label),
        )
