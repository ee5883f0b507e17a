"""Charts as SVG obey the policy of the page, whatever names they have."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.base.chart_figure import INK
from autotune.base.document import (
    Axis,
    Bar,
    BarChart,
    Chart,
    Document,
    Histogram,
    HistogramBin,
    Line,
    LineChart,
    Point,
    ReferenceLine,
    Section,
    Shade,
    Stack,
    StackedBarChart,
    Table,
)
from autotune.base.render_html import report_html
from autotune.base.svg import render_svg

# Each drawing has all the elements that its kind may have.
LINES = LineChart(
    x=Axis(label="micro-batch size", unit="count", log=2, ticks=(1, 2, 4)),
    y=Axis(label="tokens/s", unit="count", low=0),
    lines=(
        Line(
            name="measured",
            points=(Point(x=1, y=5, low=4, high=6), Point(x=2, y=7), Point(x=4, y=8)),
        ),
        Line(
            name="predicted",
            points=(Point(x=1, y=5, low=4, high=6), Point(x=4, y=9, low=8, high=10)),
            kind="line",
        ),
        Line(name="", points=(Point(x=1, y=5), Point(x=4, y=20)), kind="dotted"),
    ),
    shade=Shade(start=2, end=4, label="the knee"),
    reference_lines=(ReferenceLine(value=6, label="enough"),),
)
BARS = BarChart(
    axis=Axis(label="tokens/s", unit="count"),
    bars=(Bar(label="default", value=5, low=4, high=6, value_text="5"),),
)
STACKS = StackedBarChart(
    axis=Axis(label="memory", unit="bytes"),
    stacks=(Stack(label="predicted", parts=(("weights", 2.0**30), ("rest", 2.0**31))),),
    reference_lines=(ReferenceLine(value=2.0**32, label="budget"),),
)
HISTOGRAM = Histogram(
    x=Axis(label="tokens", unit="count"),
    y=Axis(label="share", unit="share"),
    bins=(
        HistogramBin(start=0, end=32, height=0.75),
        HistogramBin(start=32, end=64, height=0.25),
    ),
    reference_lines=(ReferenceLine(value=30, label="sequence length"),),
)
every_drawing = pytest.mark.parametrize(
    "drawing",
    [
        pytest.param(LINES, id="lines"),
        pytest.param(BARS, id="bars"),
        pytest.param(STACKS, id="stacks"),
        pytest.param(HISTOGRAM, id="histogram"),
    ],
)
TAGS = {
    "svg",
    "g",
    "path",
    "defs",
    "clipPath",
    "rect",
    "use",
    "text",
    "title",
    "desc",
    "tspan",
}
"""Tags that a chart may have: none loads a resource, runs a script or has a style."""


def draw(drawing, key="chart-1", title="Title", description="Description") -> str:
    """Return the SVG of a drawing."""
    return render_svg(drawing, key=key, title=title, description=description)


def tags_of(svg: str) -> set[str]:
    """Return the tags of an SVG, without their namespace."""
    return {
        element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()
    }


def ids_of(svg: str) -> list[str]:
    """Return the ids of the elements of one or several SVGs."""
    return re.findall(r'\sid="([^"]*)"', svg)


@every_drawing
def test_chart_obeys_strict_policy(drawing):
    svg = draw(drawing)
    assert tags_of(svg) <= TAGS
    # No styles, and no handlers of events such as onload.
    assert not re.search(r"\s(style|on\w+)=", svg)


@every_drawing
def test_chart_has_colour_of_page(drawing):
    svg = draw(drawing)
    # The text colour of the page replaces the ink that matplotlib draws with.
    assert "currentColor" in svg
    assert INK not in svg


@every_drawing
def test_chart_has_title_and_description(drawing):
    root = ElementTree.fromstring(draw(drawing))
    assert root.attrib["role"] == "img"
    text_by_id = {
        element.attrib["id"]: element.text
        for element in root.iter()
        if element.tag.endswith(("title", "desc"))
    }
    labels = [text_by_id[key] for key in root.attrib["aria-labelledby"].split()]
    assert labels == ["Title", "Description"]


@every_drawing
def test_same_drawing_has_same_text(drawing):
    assert draw(drawing) == draw(drawing)


@every_drawing
def test_ids_are_unique_in_page(drawing):
    ids = ids_of(draw(drawing) + draw(drawing, key="chart-2"))
    assert len(set(ids)) == len(ids)


@every_drawing
def test_references_stay_within_chart(drawing):
    svg = draw(drawing)
    references = re.findall(r'href="|url\(', svg)
    referenced_ids = re.findall(r'(?:href="|url\()#([^")]*)', svg)
    # Every reference is to an id, and none to another address.
    assert len(references) == len(referenced_ids)
    assert set(referenced_ids) <= set(ids_of(svg))


ODD_CHARACTERS = st.sampled_from("<>&\"'$\\{}^_%\n\r\t\0\u202e\u2066\u200b\ufeff")
HOSTILE = st.text(alphabet=st.one_of(ODD_CHARACTERS, st.characters()), max_size=60)


@settings(max_examples=25)
@given(name=HOSTILE)
def test_no_name_becomes_markup(name):
    stacks = StackedBarChart(
        axis=Axis(label=name),
        stacks=(Stack(label=name, parts=((name, 1.0), ("b", 2.0))),),
    )
    svg = draw(stacks, title=name, description=name)
    assert tags_of(svg) <= TAGS
    for element in ElementTree.fromstring(svg).iter():
        assert not any(
            attribute.startswith("on") or attribute == "style"
            for attribute in element.attrib
        )


def test_dollars_start_no_formula():
    bars = BarChart(
        axis=Axis(label="x"), bars=(Bar(label=r"$\frac{1}{2}$", value=1.0),)
    )
    assert r"$\frac{1}{2}$" in draw(bars)


def test_cuts_long_names():
    bars = BarChart(axis=Axis(label="x"), bars=(Bar(label="a" * 10_000, value=1.0),))
    svg = draw(bars)
    # 44 characters, of which the last one shows that more are left out.
    assert "a" * 43 + "…" in svg
    assert "a" * 44 not in svg


def test_infinite_points_are_not_drawn():
    def chart(*points):
        line = Line(name="odd", points=points)
        return LineChart(x=LINES.x, y=Axis(label="y"), lines=(line,))

    infinite = chart(
        Point(x=1, y=math.inf),
        Point(x=2, y=3, low=math.nan, high=4),  # drawn without its bounds
        Point(x=3, y=4),
    )
    assert draw(infinite) == draw(chart(Point(x=2, y=3), Point(x=3, y=4)))


def test_infinite_parts_are_not_drawn():
    finite = Stack(label="s", parts=(("b", 1.0),))
    infinite = Stack(label="s", parts=(("a", math.inf), ("b", 1.0)))
    assert draw(StackedBarChart(axis=STACKS.axis, stacks=(infinite,))) == draw(
        StackedBarChart(axis=STACKS.axis, stacks=(finite,))
    )


every_empty_drawing = pytest.mark.parametrize(
    "drawing",
    [
        pytest.param(
            LineChart(x=Axis(label="x", log=2), y=Axis(label="y", log=10), lines=()),
            id="no lines",
        ),
        pytest.param(BarChart(axis=Axis(label="x"), bars=()), id="no bars"),
        pytest.param(
            Histogram(x=Axis(label="x"), y=Axis(label="y"), bins=()), id="no bins"
        ),
        pytest.param(
            StackedBarChart(
                axis=Axis(label="x", unit="bytes"),
                stacks=(Stack(label="s", parts=(("a", 0.0),)),),
            ),
            id="only an empty part",
        ),
    ],
)


@every_empty_drawing
def test_draws_empty_chart_without_warning(drawing, recwarn):
    assert draw(drawing).startswith("<svg")
    assert not recwarn.list


NOTE_INSTEAD_OF_CHART = "T: no chart, because there are no values to draw."


def page_with_chart(drawing) -> str:
    """Return a page with one chart, ``T``, and its data table."""
    chart = Chart(
        title="T",
        description="D",
        drawing=drawing,
        table=Table(caption="C", headers=("a",), rows=()),
    )
    section = Section(title="S", key="s", blocks=(chart,))
    return report_html(Document(title="R", subtitle="", sections=(section,)))


@every_empty_drawing
def test_page_has_no_empty_axes(drawing):
    page = page_with_chart(drawing)
    assert "<svg" not in page
    assert NOTE_INSTEAD_OF_CHART in page
    assert "Data table" in page


@every_drawing
def test_page_has_chart_with_its_table(drawing):
    page = page_with_chart(drawing)
    assert "<svg" in page
    assert NOTE_INSTEAD_OF_CHART not in page
    assert "Data table" in page


def test_leaves_out_ticks_that_would_touch():
    # On a logarithmic axis, 256 is too close to 298.
    axis = Axis(label="micro-batch size", unit="count", log=2, ticks=(1, 256, 298))
    line = Line(name="m", points=tuple(Point(x=tick, y=1.0) for tick in axis.ticks))
    texts = re.findall(
        r"<text[^>]*>([^<]*)<",
        draw(LineChart(x=axis, y=Axis(label="y"), lines=(line,))),
    )
    assert "298" in texts
    assert "256" not in texts


def test_distant_reference_line_has_few_ticks(caplog):
    memory = LineChart(
        x=Axis(label="size", unit="count"),
        y=Axis(label="memory", unit="bytes"),
        lines=(Line(name="measured", points=(Point(x=1, y=2e5), Point(x=2, y=3e5))),),
        reference_lines=(ReferenceLine(value=2.0**26, label="budget"),),
    )
    text = draw(memory)
    assert "memory (MiB)" in text
    # matplotlib complains of too many ticks in its log.
    assert caplog.records == []
