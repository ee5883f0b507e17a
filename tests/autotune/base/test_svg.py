import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.base.document import (
    Axis,
    Bar,
    BarChart,
    Histogram,
    HistogramBin,
    Line,
    LineChart,
    Point,
    ReferenceLine,
    Shade,
    Stack,
    StackedBarChart,
)
from autotune.base.svg import render_svg

LINES = LineChart(
    x=Axis(label="rows", unit="count", log=2, ticks=(1, 2, 4)),
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
    rules=(ReferenceLine(value=6, label="enough"),),
)
BARS = BarChart(
    axis=Axis(label="tokens/s", unit="count"),
    bars=(Bar(label="default", value=5, low=4, high=6, value_text="5"),),
)
STACKS = StackedBarChart(
    axis=Axis(label="memory", unit="bytes"),
    stacks=(Stack(label="predicted", parts=(("weights", 2.0**30), ("rest", 2.0**31))),),
    rules=(ReferenceLine(value=2.0**32, label="budget"),),
)
COLUMNS = Histogram(
    x=Axis(label="tokens", unit="count"),
    y=Axis(label="share", unit="share"),
    bins=(
        HistogramBin(start=0, end=32, height=0.75),
        HistogramBin(start=32, end=64, height=0.25),
    ),
    rules=(ReferenceLine(value=30, label="row"),),
)
EVERY = pytest.mark.parametrize(
    "drawing",
    [LINES, BARS, STACKS, COLUMNS],
    ids=["lines", "bars", "stacks", "columns"],
)


def draw(drawing, key="chart-1", title="Title", description="What it shows"):
    return render_svg(drawing, key=key, title=title, description=description)


@EVERY
def test_a_chart_needs_nothing_that_a_strict_policy_forbids_and_has_the_colour_of_the_page(
    drawing,
):
    svg = draw(drawing)
    tags = {
        element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()
    }
    assert not tags & {
        "style",
        "script",
        "image",
        "foreignObject",
        "a",
        "metadata",
        "animate",
        "set",
    }
    assert not re.search(r"\s(style|on\w+)=", svg)
    assert "currentColor" in svg
    assert "#010203" not in svg


@EVERY
def test_a_chart_has_words_for_those_who_cannot_see_it_and_the_same_text_again_with_references_within_it(
    drawing,
):
    first, second = draw(drawing), draw(drawing, key="chart-2")
    assert draw(drawing) == first
    root = ElementTree.fromstring(first)
    assert root.attrib["role"] == "img"
    named = {
        element.attrib["id"]: element.text
        for element in root.iter()
        if element.tag.endswith(("title", "desc"))
    }
    assert [named[name] for name in root.attrib["aria-labelledby"].split()] == [
        "Title",
        "What it shows",
    ]
    ids = re.findall(r'\sid="([^"]*)"', first + second)
    assert len(set(ids)) == len(ids)
    assert len(re.findall(r'href="|url\(', first)) == len(
        targets := re.findall(r'(?:href="|url\()#([^")]*)', first)
    )
    assert set(targets) <= set(re.findall(r'\sid="([^"]*)"', first))


ODD = st.sampled_from("<>&\"'$\\{}^_%\n\r\t\0\u202e\u2066\u200b\ufeff")
HOSTILE = st.text(alphabet=st.one_of(ODD, st.characters()), max_size=60)


@settings(max_examples=25)
@given(HOSTILE)
def test_no_name_can_become_markup_or_a_formula_or_break_the_drawing(name):
    stacks = StackedBarChart(
        axis=Axis(label=name),
        stacks=(Stack(label=name, parts=((name, 1.0), ("b", 2.0))),),
    )
    root = ElementTree.fromstring(draw(stacks, title=name or "x", description="d"))
    known = {
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
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= known
    for element in root.iter():
        assert not any(
            attribute.startswith("on") or attribute == "style"
            for attribute in element.attrib
        )


def test_a_dollar_is_a_dollar_and_long_names_are_cut_to_what_a_chart_has_room_for():
    bars = BarChart(
        axis=Axis(label="x"), bars=(Bar(label=r"$\frac{1}{2}$", value=1.0),)
    )
    assert r"$\frac{1}{2}$" in draw(bars)
    bars = BarChart(axis=Axis(label="x"), bars=(Bar(label="a" * 10_000, value=1.0),))
    svg = draw(bars)
    assert "a" * 43 + "…" in svg
    assert "a" * 44 not in svg


def test_what_is_not_finite_is_not_drawn():
    odd = Point(x=1, y=math.inf), Point(x=2, y=3, low=math.nan, high=4), Point(x=3, y=4)
    lines = LineChart(
        x=LINES.x, y=Axis(label="y"), lines=(Line(name="odd", points=odd),)
    )
    plain = LineChart(
        x=LINES.x,
        y=Axis(label="y"),
        lines=(Line(name="odd", points=(Point(x=2, y=3), Point(x=3, y=4))),),
    )
    assert draw(lines) == draw(plain)
    finite = Stack(label="s", parts=(("b", 1.0),))
    infinite = Stack(label="s", parts=(("a", math.inf), ("b", 1.0)))
    assert draw(StackedBarChart(axis=STACKS.axis, stacks=(infinite,))) == draw(
        StackedBarChart(axis=STACKS.axis, stacks=(finite,))
    )


@pytest.mark.parametrize(
    "empty",
    [
        LineChart(x=Axis(label="x", log=2), y=Axis(label="y", log=10), lines=()),
        BarChart(axis=Axis(label="x"), bars=()),
        Histogram(x=Axis(label="x"), y=Axis(label="y"), bins=()),
        StackedBarChart(
            axis=Axis(label="x", unit="bytes"),
            stacks=(Stack(label="s", parts=(("a", 0.0),)),),
        ),
    ],
    ids=["lines", "bars", "columns", "stacks"],
)
def test_nothing_to_draw_is_drawn_without_complaint(empty, recwarn):
    assert draw(empty).startswith("<svg")
    assert not recwarn.list


def test_marks_that_would_touch_are_left_out():
    axis = Axis(label="rows", unit="count", log=2, ticks=(1, 256, 298))
    line = Line(name="m", points=tuple(Point(x=tick, y=1.0) for tick in axis.ticks))
    texts = re.findall(
        r"<text[^>]*>([^<]*)<",
        draw(LineChart(x=axis, y=Axis(label="y"), lines=(line,))),
    )
    assert "298" in texts
    assert "256" not in texts
