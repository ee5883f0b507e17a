import re
from dataclasses import replace

from autotune.core.cards import find_card
from autotune.show.report.document import Missing, Table, blocks_of
from autotune.show.report.markdown import report_markdown
from benchmarks.gpu.all import STAGES
from benchmarks.gpu.check.bars import GPU_BARS
from benchmarks.gpu.check.page import STAGE_NAMES, check_document, check_page, results_document
from benchmarks.gpu.check.results import Figure, StageResult
from benchmarks.gpu.stage.memory import tuned
from tests.benchmarks.gpu.reports import full_report


def cells(document, caption: str) -> dict[str, tuple]:
    (table,) = (one for one in blocks_of(document) if isinstance(one, Table) and caption in one.caption)
    return {row[0]: tuple(row[1:]) for row in table.rows}


def test_the_page_knows_every_stage():
    assert list(STAGE_NAMES) == [stage.name for stage in STAGES]


def test_every_bar_stands_there_whether_measured_or_not():
    rows = cells(check_document(full_report()), "Bars")
    assert len(rows) == len(GPU_BARS)
    assert rows["MFU of 120M parameters"] == ("47.0 %", "at least 45.0 %", "held")
    assert rows["MFU of 350M parameters"] == (None, "at least 50.0 %", "not measured")


def test_a_short_bar_is_not_hidden():
    rows = cells(check_document(full_report(mfu=0.3)), "Bars")
    assert rows["MFU of 120M parameters"][-1] == "SHORT"


def test_speed_is_labelled_with_its_card_beside_published_ones():
    rows = cells(check_document(full_report()), "beside published")
    assert rows["this project, bert-120m, 1 x NVIDIA H200, bf16, packed rows of 512"] == ("612,345", "47.0 %")
    assert rows["this project, bert-350m, bf16, packed rows of 512"] == ("not measured", "not measured")
    assert any("ModernBERT base" in name for name in rows)


def test_what_is_missing_says_why_and_names_the_command():
    missing = [one for one in blocks_of(check_document(full_report())) if isinstance(one, Missing)]
    by_stage = {re.search(r"stage (\w+)", one.what)[1]: one for one in missing}
    assert by_stage["memory"].state == "failed"
    assert "broken" in by_stage["memory"].what
    assert by_stage["memory"].commands[0].endswith("--only memory")
    assert by_stage["ranks"].commands[0].endswith("--only ranks --nproc 2")
    assert "train" not in by_stage


def test_nothing_of_a_report_becomes_markup():
    page = check_page(full_report())
    assert "<b>broken" not in page
    assert "&lt;b&gt;broken" in page


def test_the_papers_rows_stand_beside_ours():
    rows = cells(check_document(full_report()), "the paper's shape")
    assert rows["bert-120m, the paper-style step itself"][0] == "184"
    assert rows["bert-350m, set up as the paper's trainer"][0] == "20"
    assert all(row[-1] == "not measured" for row in rows.values())


def with_memory(budget_bytes: int):
    name = tuned("bert-120m").name
    account = {
        "budget_bytes": budget_bytes, "largest_rows": 430, "predicted_rows": 432, "peak_bytes": budget_bytes - 1,
        "traced_peak_bytes": budget_bytes, "calibrated_peak_bytes": budget_bytes, "trials": [[430, True, 1]],
    }  # fmt: skip
    figure = Figure(name="tuned_bert_120m_largest_rows_count", label="measured", value=430)
    stage = StageResult(name="memory", status="measured", figures=(figure,), details={"settings": {name: account}})
    report = full_report()
    return name, replace(report, stages=tuple(stage if one.name == "memory" else one for one in report.stages))


def test_rows_stand_beside_those_of_an_h100_nvl_only_under_its_memory():
    of_nvl, of_80_gb = find_card("h100-nvl-94gb").cuda_total_bytes, 79 * 2**30
    name, report = with_memory(of_nvl)
    assert cells(check_document(report), "Predicted without")[name][-1] == "430"
    assert cells(check_document(report), "the paper's shape")["bert-120m, tuned"][-1] == "430"
    name, report = with_memory(of_80_gb)
    assert cells(check_document(report), "Predicted without")[name][-1] == "430 under 79 GiB"
    assert cells(check_document(report), "the paper's shape")["bert-120m, tuned"][-1] == "not measured"
    assert cells(check_document(report), "Largest micro-batches")[name][1] == "430"


def test_without_any_gpu_all_figures_are_predicted_or_not_measured():
    document = results_document([])
    rows = cells(document, "Bars")
    assert {row[-1] for row in rows.values()} == {"not measured"}
    assert {row[-1] for row in cells(document, "Predicted without a GPU").values()} == {"not measured"}
    assert "No GPU has been measured yet" in document.subtitle


def test_several_gpus_stand_apart():
    reports = [full_report(), replace(full_report(), device="h100-nvl")]
    document = results_document(reports)
    keys = [one.key for one in blocks_of(document) if hasattr(one, "key")]
    assert len(keys) == len(set(keys))
    assert report_markdown(document).count("47.0 %") == 4


def test_tiny_sizes_are_held_against_nothing():
    report = replace(full_report(mfu=0.3), sizes="tiny", bars=())
    assert {row[-1] for row in cells(check_document(report), "Bars").values()} == {"not measured"}
    assert all("H200" not in name for name in cells(check_document(report), "beside published"))
    assert "Sizes are tiny" in check_page(report)
