import json

from benchmarks.document import FAULTS, ROOT, performance, read_figures, read_gpu_figures, reliability


def test_what_the_documents_quote_is_what_the_files_hold():
    assert (ROOT / "docs" / "performance.md").read_text() == performance(read_figures(), read_gpu_figures())
    assert (ROOT / "docs" / "reliability.md").read_text() == reliability(json.loads(FAULTS.read_text()))


def test_a_bar_that_is_short_is_not_hidden():
    bar = {"name": "x_s", "figure": 2.0, "unit": "s", "bar": 1.0, "direction": "<=", "holds": False}
    assert "| `x_s` | 2 s | ≤ 1 s | **short** |" in performance({"x": {"bars": [bar]}}, None)
    missing = bar | {"figure": None, "holds": None}
    assert "| `x_s` | n/a | ≤ 1 s | not measured |" in performance({"x": {"bars": [missing]}}, None)


def test_figures_from_a_gpu_carry_the_name_of_their_card_and_their_absence_is_said():
    assert "Not measured: no figure" in performance({}, None)
    found = {"real_tokens_per_s": 1e6, "mfu": 0.47}
    gpu = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "mfu": {"bert-120m": found}, "bars": []}
    text = performance({}, gpu)
    assert "Measured on one NVIDIA H200 with torch 2.11" in text
    assert "| mfu: bert-120m | 1,000,000 | 47.0% |" in text
