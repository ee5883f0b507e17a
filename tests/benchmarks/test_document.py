import json

import pytest

from benchmarks.document import FIGURES, ROOT, names_of, pages, quoted
from benchmarks.paper_case import SETTINGS, predicted

NAMES = names_of(ROOT)
PAPER_CASES = json.loads((FIGURES / "paper_case.json").read_text())["cases"]


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: path.stem)
def test_page_quotes_the_recorded_figures(path):
    page = path.read_text()
    assert page == quoted(page, NAMES), "stale: make figures"


def test_figures_are_written_between_marks():
    names = {"found": [{"name": "a", "share": 0.5}, {"name": "b", "share": 0.25}]}
    page = (
        "At most <!-- = {found[0]['share']:.0%} --><!-- end -->.\n\n<!-- rows found : |"
        " {name} | {share:.0%} | -->\n\n| x | y |\n|---|---|\n| old | row |\n\n<!-- end"
        " -->\n"
    )
    once = quoted(page, names)
    assert "At most <!-- = {found[0]['share']:.0%} -->50 %<!-- end -->." in once
    assert "| x | y |\n|---|---|\n| a | 50 % |\n| b | 25 % |\n\n<!-- end -->" in once
    assert quoted(once, names) == once


def test_all_paper_settings_are_recorded():
    assert set(PAPER_CASES) == set(SETTINGS)


def test_bar_below_target_is_shown():
    page = (ROOT / "docs" / "reference" / "figures.md").read_text()
    bar = {
        "name": "x_s",
        "figure": 2.0,
        "unit": "s",
        "bar": 1.0,
        "direction": "<=",
        "holds": False,
    }
    text = quoted(
        page,
        {**NAMES, "bars": [bar, bar | {"name": "y_s", "figure": None, "holds": None}]},
    )
    assert "| `x_s` | 2 s | ≤ 1 s | **short** |" in text
    assert "| `y_s` | n/a | ≤ 1 s | not measured |" in text


@pytest.mark.slow
def test_estimate_matches_the_recorded_paper_case():
    name = "as the paper's trainer"
    assert predicted(SETTINGS[name]) == PAPER_CASES[name]
