import json

from benchmarks.document import FAULTS, ROOT, performance, read_figures, reliability


def test_what_the_documents_quote_is_what_the_files_hold():
    assert (ROOT / "docs" / "performance.md").read_text() == performance(read_figures())
    assert (ROOT / "docs" / "reliability.md").read_text() == reliability(json.loads(FAULTS.read_text()))


def test_a_bar_that_is_short_is_not_hidden():
    bar = {"name": "x_s", "figure": 2.0, "unit": "s", "bar": 1.0, "direction": "<=", "holds": False}
    assert "| `x_s` | 2 s | ≤ 1 s | **short** |" in performance({"x": {"bars": [bar]}})
    missing = bar | {"figure": None, "holds": None}
    assert "| `x_s` | n/a | ≤ 1 s | not measured |" in performance({"x": {"bars": [missing]}})
