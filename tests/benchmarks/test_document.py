import json

import pytest

from benchmarks.document import FIGURES, ROOT, names_of, pages, quoted
from benchmarks.paper_case import SETTINGS, predicted

NAMES = names_of(ROOT)
PAPER_CASES = json.loads((FIGURES / "paper_case.json").read_text())["cases"]


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: path.stem)
def test_what_a_page_quotes_is_what_the_files_hold(path):
    page = path.read_text()
    assert page == quoted(page, NAMES), "stale: make figures"


def test_figures_and_rows_are_written_between_a_mark_and_its_end():
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


def test_all_settings_of_the_papers_case_are_in_the_file():
    assert set(PAPER_CASES) == set(SETTINGS)


def test_a_bar_that_is_short_or_was_not_measured_is_not_hidden():
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
def test_the_papers_case_is_what_the_estimate_says_now():
    name = "as the paper's trainer"
    assert predicted(SETTINGS[name]) == PAPER_CASES[name]
