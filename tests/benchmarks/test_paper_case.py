import json

import pytest

from benchmarks.document import FIGURES
from benchmarks.paper_case import SETTINGS, predicted

KEPT = json.loads((FIGURES / "paper_case.json").read_text())["cases"]


@pytest.mark.slow
def test_what_the_file_holds_is_what_the_estimate_says_now():
    name = "as the paper's trainer"
    assert predicted(SETTINGS[name]) == KEPT[name]


def test_all_settings_are_in_the_file():
    assert set(KEPT) == set(SETTINGS)
