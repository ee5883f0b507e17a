import re

import pytest

from benchmarks.document import ROOT, read_figures
from benchmarks.recommendations import page

KNOWN = ("measured", "predicted", "simulated", "not measured", "as reported")


@pytest.fixture(scope="module")
def text() -> str:
    return page(read_figures())


def test_what_the_page_quotes_is_what_the_files_hold_and_arithmetic_says(text):
    assert (ROOT / "docs" / "paper.md").read_text() == text, "stale: make figures"


def test_each_recommendation_has_a_part_with_what_the_paper_says(text):
    parts = re.split(r"\n## \d\. ", text)[1:]
    assert len(parts) == 5
    assert all("**The paper:** " in part for part in parts)


def test_every_figure_says_how_it_is_known(text):
    heads = [line for line in text.splitlines() if line.startswith("| ") and line.endswith("| known |")]
    assert len(heads) == 6
    for table in re.findall(r"\| known \|\n\|[-:|]+\n((?:\|.*\n)+)", text):
        for row in table.splitlines():
            assert row.rpartition(" | ")[2].startswith(KNOWN), row


def test_what_is_predicted_to_fit_stands_beside_what_the_paper_reports(text):
    assert "| the paper | 184 | 20 | as reported |" in text
    assert re.search(r"\| as the paper's trainer \| \d+ \(\d+ to \d+\) \| \d+ \(\d+ to \d+\) \| predicted \|", text)


def test_the_page_about_memory_quotes_the_same_figures():
    cases = read_figures()["paper_case"]["cases"]
    told = (ROOT / "docs" / "memory.md").read_text()
    for models in cases.values():
        shown = (f"{one['rows']:,} ({one['rows_low']:,}\u2013{one['rows_high']:,})" for one in models.values())
        assert f"| {' | '.join(shown)} |" in told
