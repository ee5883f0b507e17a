import json

from autotune.show.report.markdown import report_markdown
from benchmarks.document import (
    FAULTS,
    GPU_CHECKS,
    ROOT,
    WITHOUT_A_GPU,
    performance,
    read_figures,
    read_gpu_checks,
    reliability,
    without_a_gpu,
)
from benchmarks.gpu.check.page import results_document
from tests.benchmarks.gpu.reports import full_report


def test_what_the_documents_quote_is_what_the_files_hold():
    assert (ROOT / "docs" / "performance.md").read_text() == performance(read_figures())
    page = WITHOUT_A_GPU.read_text()
    assert page == without_a_gpu(page, read_figures())
    assert (ROOT / "docs" / "reliability.md").read_text() == reliability(json.loads(FAULTS.read_text()))


def test_a_bar_that_is_short_is_not_hidden():
    bar = {"name": "x_s", "figure": 2.0, "unit": "s", "bar": 1.0, "direction": "<=", "holds": False}
    assert "| `x_s` | 2 s | ≤ 1 s | **short** |" in performance({"x": {"bars": [bar]}})
    missing = bar | {"figure": None, "holds": None}
    assert "| `x_s` | n/a | ≤ 1 s | not measured |" in performance({"x": {"bars": [missing]}})


def test_the_document_of_gpus_is_what_the_kept_checks_hold():
    page = report_markdown(results_document(read_gpu_checks(GPU_CHECKS)))
    assert (ROOT / "docs" / "gpu-results.md").read_text() == page


def test_of_every_gpu_the_newest_check_counts(tmp_path):
    for day, figure in (("2026-01-01", 0.4), ("2026-02-01", 0.5)):
        place = tmp_path / "nvidia-h200" / day
        place.mkdir(parents=True)
        (place / "gpu-check.json").write_text(json.dumps(full_report(mfu=figure).to_json()))
    (found,) = read_gpu_checks(tmp_path)
    assert found.stage("train").value("bert_120m_mfu_share") == 0.5


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
