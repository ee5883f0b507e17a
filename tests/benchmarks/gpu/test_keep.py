import json
import zipfile
from dataclasses import replace

import pytest

from benchmarks.gpu import keep as keeping
from benchmarks.gpu.check.results import Figure, Sheet
from benchmarks.gpu.keep import keep
from tests.benchmarks.gpu.reports import full_report


def found(tmp_path, report):
    place = tmp_path / "found"
    place.mkdir()
    (place / "gpu-check.json").write_text(json.dumps(report.to_json()))
    (place / "ledger.jsonl").write_text("{}\n")
    with zipfile.ZipFile(place / "tune.zip", "w") as packed:
        packed.writestr("profiles/bert-120m-h200.toml", "# a profile\n")
    return place


def test_a_check_is_kept_by_gpu_and_date_and_its_archive_unpacked(tmp_path):
    place = keep(found(tmp_path, full_report()), tmp_path / "kept")
    assert place == tmp_path / "kept" / "h200" / "2026-01-01"
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    assert files == ["gpu-check.html", "gpu-check.json", "ledger.jsonl", "tune/profiles/bert-120m-h200.toml"]


def test_one_of_the_same_day_is_replaced(tmp_path):
    place = keep(found(tmp_path, full_report()), tmp_path / "kept")
    (place / "old").touch()
    keep(tmp_path / "found", tmp_path / "kept")
    assert not (place / "old").exists()


def with_figures(report, name, figures, driver="580.1"):
    facts = {"facts": {"name": "NVIDIA H200", "driver": driver}}
    changed = {name: {"figures": figures}, "machine": {"details": {"gpus": [facts]}}}
    stages = [replace(stage, **changed.get(stage.name, {})) for stage in report.stages]
    return replace(report, stages=tuple(stages))


@pytest.mark.parametrize(
    ("stage", "name", "value", "said"),
    [
        ("ceilings", "matmul_bf16_flops_per_s", 8.6e15, "8,600 TFLOP/s in bf16 measured on NVIDIA H200"),
        ("ceilings", "copy_read_plus_write_bytes_per_s", 5.2e12, "5.2 TB/s of memory measured on NVIDIA H200"),
        ("nvml", "full_load_matmul_flops_per_s", 1.2e15, "1,200 TFLOP/s"),
        ("train", "bert_120m_mfu_share", 1.2, "no GPU does more than 1"),
        ("train", "bert_120m_real_tokens_per_s", 5e6, "2,371 TFLOP/s in bf16 measured on NVIDIA H200"),
        ("ranks", "link_bytes_per_s", 2e12, "2 TB/s of links measured on NVIDIA H200"),
    ],
)
def test_a_check_that_says_what_its_gpu_cannot_do_is_not_kept(tmp_path, stage, name, value, said):
    possible = with_figures(full_report(), stage, (Figure(name=name, label="measured", value=value / 20),))
    keep(found(tmp_path, possible), tmp_path / "kept")
    impossible = with_figures(full_report(), stage, (Figure(name=name, label="measured", value=value),))
    (tmp_path / "found" / "gpu-check.json").write_text(json.dumps(impossible.to_json()))
    with pytest.raises(ValueError, match=said):
        keep(tmp_path / "found", tmp_path / "kept")


def test_a_check_of_a_pretended_gpu_is_not_kept(tmp_path):
    report = with_figures(full_report(), "train", (), driver="0.0 (nullgpu)")
    with pytest.raises(ValueError, match="pretended NVIDIA H200"):
        keep(found(tmp_path, report), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_any_stage_tells_that_the_gpu_is_a_pretended_one_and_one_must_tell_its_name(tmp_path):
    report = full_report()
    stages = [replace(stage, details={}) if stage.name == "machine" else stage for stage in report.stages]
    with pytest.raises(ValueError, match="does not name its GPU"):
        keep(found(tmp_path, replace(report, stages=tuple(stages))), tmp_path / "kept")
    stages[-1] = replace(stages[-1], made_with={"driver": "0.0 (nullgpu)"})
    (tmp_path / "found" / "gpu-check.json").write_text(json.dumps(replace(report, stages=tuple(stages)).to_json()))
    with pytest.raises(ValueError, match="pretended h200"):
        keep(tmp_path / "found", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_figures_of_a_pretended_gpu_are_the_allocators_or_none():
    sheet = Sheet(pretended=True)
    sheet.measured("peak_bytes", 5.0)
    sheet.measured("tuned_bert_120m_largest_rows_count", 432)
    for name in ("bert_120m_real_tokens_per_s", "matmul_bf16_flops_per_s", "bert_120m_mfu_share", "step_s"):
        sheet.measured(name, 1.0)
    assert [figure.label for figure in sheet.figures] == ["allocator"] * 2 + ["not measured"] * 4


def test_more_than_a_gpus_peak_is_not_measured():
    sheet = Sheet()
    sheet.measured("bert_120m_mfu_share", 1.3)
    assert (sheet.figures[0].label, sheet.figures[0].value) == ("not measured", None)


def test_a_check_of_the_check_itself_is_refused(tmp_path, capsys):
    directory = found(tmp_path, replace(full_report(), sizes="tiny", bars=()))
    with pytest.raises(ValueError, match="sizes are tiny"):
        keep(directory, tmp_path / "kept")
    assert keeping.main([str(directory)]) == 2
    assert "next: where there is a GPU, python -m benchmarks.gpu.all" in capsys.readouterr().err
