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


def test_loops_of_training_say_what_was_injected_and_what_held():
    loop = {"injected": "SIGKILL", "held": "same weights", "faults": 3, "runs": 2, "seconds": 12.3}
    moved = loop | {"runs": 0, "largest_relative_difference_of_loss": 5.4e-8}
    text = reliability({"points": 20, "training": {"killed": loop, "moved": moved}})
    assert "| killed | SIGKILL | 3 | 2 | same weights | 12 s |" in text
    assert "| moved | SIGKILL | 3 | n/a | same weights | 12 s |" in text
    assert "no loss was further than 5e-08, relative" in text
    assert "## Training" not in reliability({"points": 20})


def test_loops_of_tunings_have_a_table_of_their_own():
    loop = {"injected": "SIGKILL", "held": "the same is decided", "faults": 10, "runs": 2, "seconds": 300.4}
    text = reliability({"points": 20, "tuning": {"tune SIGKILL": loop}})
    assert "## Tuning" in text
    assert "| tune SIGKILL | SIGKILL | 10 | 2 | the same is decided | 300 s |" in text
    assert "## Tuning" not in reliability({"points": 20})
