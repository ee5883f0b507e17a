import pytest

from autotune.errors import BadInput
from benchmarks.document import (
    ROOT,
    SUBJECTS,
    all_figures,
    keys_of,
    pages,
    updated,
)
from benchmarks.page_figures.recorded import read_recorded_figures
from benchmarks.paper_case import SETTINGS, predicted

RECORDED = read_recorded_figures(ROOT)
FIGURES = all_figures(RECORDED)
PAPER_CASES = RECORDED.benchmarks["paper_case"]["cases"]
SOME = {"run.mfu": "50 %", "run.sizes": [["a", "1"], ["b", "2"]]}
TABLE = (
    "<!-- table run.sizes -->\n\n| x | y |\n|---|---|\n| old | row |\n\n<!-- end -->\n"
)


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: path.stem)
def test_page_quotes_the_recorded_figures(path):
    page = path.read_text()
    assert page == updated(path.name, page, FIGURES), "stale: make figures"


def test_every_key_is_on_a_page():
    quoted = {key for path in pages(ROOT) for key in keys_of(path.read_text())}
    assert sorted(FIGURES.keys() - quoted) == []


def test_keys_are_unique():
    keys = [key for subject in SUBJECTS for key in subject.figures(RECORDED)]
    assert len(keys) == len(set(keys))


def test_writes_figure_between_its_marks():
    page = updated("page.md", "MFU: <!-- = run.mfu -->0 %<!-- end -->.", SOME)
    assert page == "MFU: <!-- = run.mfu -->50 %<!-- end -->."


def test_writes_rows_below_their_head():
    page = updated("page.md", TABLE, SOME)
    assert page == TABLE.replace("| old | row |", "| a | 1 |\n| b | 2 |")


def test_updating_twice_changes_nothing():
    once = updated("page.md", TABLE, SOME)
    assert updated("page.md", once, SOME) == once


@pytest.mark.parametrize(
    ("mark", "message", "next_step"),
    [
        ("<!-- = run.mfo -->1<!-- end -->", "page.md: .*'run.mfo'", "'run.mfu'"),
        ("<!-- = run.sizes --><!-- end -->", "no figure has the key 'run.sizes'", ""),
        ("<!-- table run.mfu --><!-- end -->", "no table has the key 'run.mfu'", ""),
        ("<!-- = {run['mfu']} --><!-- end -->", r"the key \"{run\['mfu'\]}\"", ""),
        ("<!-- = run.mfu -->1\n" + TABLE, "page.md: .*run.mfu --> has no end", "end"),
        (TABLE.replace("| x | y |", "| x |"), "head of 1 columns, and rows of 2", ""),
    ],
)
def test_rejects_wrong_mark(mark, message, next_step):
    with pytest.raises(BadInput, match=message) as rejected:
        updated("page.md", mark, SOME)
    assert next_step in rejected.value.next_step


def test_all_paper_settings_are_recorded():
    assert set(PAPER_CASES) == set(SETTINGS)


@pytest.mark.slow
def test_estimate_matches_the_recorded_paper_case():
    name = "as the paper's trainer"
    assert predicted(SETTINGS[name]) == PAPER_CASES[name]
