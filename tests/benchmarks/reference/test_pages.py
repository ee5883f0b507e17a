import pytest

from benchmarks.reference.pages import DIRECTORY, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_what_the_reference_says_is_what_the_code_says(name):
    assert (DIRECTORY / name).read_text() == PAGES[name](), "stale: make figures"


def test_no_page_of_reference_is_written_by_nobody():
    assert {path.name for path in DIRECTORY.iterdir()} == set(PAGES)
