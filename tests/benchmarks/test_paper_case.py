import json

import pytest

from benchmarks.document import FIGURES
from benchmarks.paper_case import SETTINGS, predicted


@pytest.mark.slow
def test_what_the_file_holds_is_what_the_estimate_says_now():
    kept = json.loads((FIGURES / "paper_case.json").read_text())["cases"]
    name = "as the paper's trainer"
    assert predicted(SETTINGS[name]) == kept[name]


def test_all_settings_are_in_the_file():
    assert set(json.loads((FIGURES / "paper_case.json").read_text())["cases"]) == set(SETTINGS)
