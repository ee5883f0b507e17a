"""The report in a real Chromium."""

import pytest

from autotune.base.render_html import report_html
from autotune.report.page import report_document
from testbed.browser import HOSTILE, PAPER_PX, SERIOUS, audit, taken_in, visit
from testbed.examples.tuning import example_inputs

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("browser")]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    document = report_document(*example_inputs(10, HOSTILE))
    path.write_text(report_html(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("media", "width"),
    [
        ("screen", 360),
        pytest.param("screen", 1600, marks=pytest.mark.slow),
        pytest.param("print", PAPER_PX, marks=pytest.mark.slow),
    ],
)
def test_hostile_report_stays_plain_text(page, media, width):
    seen = visit(page, width=width, media=media)
    assert set(taken_in(seen).values()) == {0}
    assert seen.requests == ()
    assert seen.console_errors == ()
    assert seen.page_errors == ()
    assert seen.wider_by_px == 0


def test_visit_finds_every_fault_of_a_page(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><title>t</title><body style='width:3000px' onclick='x()'><img"
        " src='https://e.example/x.png'><script>console.error('loud'); alert('hi');"
        " missing()</script>"
    )
    seen = visit(bad)
    assert seen.requests == ("https://e.example/x.png",)
    assert seen.dialogs == ("hi",)
    assert any("loud" in line for line in seen.console_errors)
    assert any("missing" in line for line in seen.page_errors)
    assert (seen.scripts, seen.handlers) == (1, 1)
    assert seen.wider_by_px > 1000


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_report_is_accessible(page, width, colours):
    barriers = audit(page, width=width, colours=colours)
    assert [barrier for barrier in barriers if barrier.impact in SERIOUS] == []


@pytest.mark.slow
def test_audit_finds_barriers(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><html lang=en><title>t</title><main><h1>t</h1><img src=x><p"
        " style='color:#ccc'>pale"
    )
    assert {"image-alt", "color-contrast"} <= {barrier.rule for barrier in audit(bad)}
