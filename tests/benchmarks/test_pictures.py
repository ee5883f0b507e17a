"""Charts of the documentation show the recorded figures."""

import re

import pytest

from benchmarks import pictures
from benchmarks.document import ROOT
from benchmarks.page_figures.recorded import read_recorded_figures

CHARTS = ("memory", "scaling", "throughput")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Return a directory in which the charts have just been drawn."""
    pytest.importorskip("matplotlib")
    root = tmp_path_factory.mktemp("root")
    (root / "docs" / "assets").mkdir(parents=True)
    pictures.draw(root, read_recorded_figures(ROOT))
    return root / "docs" / "assets"


@pytest.mark.parametrize("name", CHARTS)
def test_chart_shows_the_recorded_figures(drawn, name):
    committed = ROOT / "docs" / "assets" / f"{name}.svg"
    # Releases of matplotlib differ in the last digits.
    outlines = pytest.approx(outlines_of(committed), abs=1)
    assert outlines_of(drawn / f"{name}.svg") == outlines


def outlines_of(chart):
    """Return the coordinates of all lines and bars of a chart."""
    outlines = re.findall(r'<path d="([^"]+)"', chart.read_text())
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", str(outlines))]
