import functools
import json
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.alone import train as train_program
from benchmarks.gpu.check.children import Ended
from benchmarks.gpu.check.results import Figure, Sheet, StageResult
from benchmarks.gpu.check.rig import NoTimeLeft, TimeBox, TrialFailed
from benchmarks.gpu.stage import maths, train
from tests.benchmarks.gpu.rigs import make_rig
from tests.simulators.corpora import real_lengths, write_learnable_corpus

GOOD = Ended(exit_code=0, cut_off=False, tail="")


def written(tmp_path, monkeypatch, found: dict, ended: Ended = GOOD, stage=train, earlier=None, told=()):
    told = told if isinstance(told, list) else []
    rig = make_rig(tmp_path, lambda trial: None)
    rig.unfinished = {"train": replace(earlier, made_with=rig.made_with)} if earlier else {}
    monkeypatch.setattr(rig, "program", lambda *_, known=None: (told.append(known), ((known or {}) | found, ended))[1])
    sheet, error = Sheet(), None
    try:
        stage.measure(rig, sheet, TimeBox(clock=rig.clock, end_s=rig.clock.monotonic_s() + 60))
    except (NoTimeLeft, TrialFailed) as failed:
        error = failed
    return {figure.name: figure for figure in sheet.figures}, error


def test_rivals_are_compared_turn_by_turn(tmp_path, monkeypatch):
    # Everything was half as fast in the second turn: that is no difference between trainers.
    rates = {"ours": [30.0, 16.0, 31.0], "paper-style": [2.0, 1.0, 2.0]}
    figures, error = written(tmp_path, monkeypatch, {"rivals": {"real_tokens_per_s": rates}})
    assert error is None
    assert figures["against_paper_style_ratio"].value == 15.5
    assert figures["against_hf_trainer_ratio"].label == "not measured"


def test_a_cut_off_program_keeps_what_it_had(tmp_path, monkeypatch):
    row = {"real_tokens_per_s": 6e5, "mfu": 0.47, "mfu_6n": 0.5, "step_s": 0.08, "peak_memory_bytes": 1}
    ended = Ended(exit_code=-9, cut_off=True, tail="")
    figures, error = written(tmp_path, monkeypatch, {"mfu": {"bert-120m": row}}, ended)
    assert isinstance(error, NoTimeLeft)
    assert figures["bert_120m_mfu_share"].value == 0.47
    assert figures["bert_350m_mfu_share"].reason == "the program did not come to it"


def test_what_was_cut_off_goes_on_and_keeps_the_readings_of_its_time(tmp_path, monkeypatch):
    row = {"real_tokens_per_s": 6e5, "mfu": 0.47, "mfu_6n": 0.5, "step_s": 0.08, "peak_memory_bytes": 1}
    reading = Figure(name="bert_120m_gpm_sm_utilisation_share", label="measured", value=0.97)
    earlier = StageResult(
        name="train", status="not measured", measured_utc="2026-01-02T03:04:05+00:00", figures=(reading,),
        details={
            "mfu": {"bert-120m": row | {"window_start_s": 1.0, "window_end_s": 2.0}},
            "ablation": {"everything": {"not measured": "no such kernel"}},
        },
    )  # fmt: skip
    rates, told = {"ours": [30.0], "HF Trainer": [10.0]}, []
    figures, error = written(
        tmp_path, monkeypatch, {"rivals": {"real_tokens_per_s": rates}}, earlier=earlier, told=told
    )
    assert error is None
    assert told == [{"mfu": {"bert-120m": row}}]  # what failed is tried again
    assert figures["bert_120m_mfu_share"].value == 0.47
    assert figures["bert_120m_gpm_sm_utilisation_share"] == reading
    assert figures["against_hf_trainer_ratio"].value == 3.0


def test_the_program_goes_on_with_rows_that_are_missing(tmp_path, monkeypatch):
    out = tmp_path / "train.json"
    out.write_text(json.dumps({"mfu": {"bert-120m": {"real_tokens_per_s": 1.0}}}))
    monkeypatch.setattr(train_program, "_ours", lambda bench, make_match: {"real_tokens_per_s": 2.0})
    words = ["--device", "cpu", "--data", str(tmp_path), "--json", str(out), "--only", "mfu"]
    assert train_program.main([*words, "--go-on"]) == 0
    found = json.loads(out.read_text())["mfu"]
    assert {name: row["real_tokens_per_s"] for name, row in found.items()} == {"bert-120m": 1.0, "bert-350m": 2.0}
    assert train_program.main(words) == 0
    assert json.loads(out.read_text())["mfu"]["bert-120m"] == {"real_tokens_per_s": 2.0}


def test_a_program_that_fails_says_why(tmp_path, monkeypatch):
    ended = Ended(exit_code=1, cut_off=False, tail="RuntimeError: no such kernel")
    _, error = written(tmp_path, monkeypatch, {}, ended)
    assert isinstance(error, TrialFailed)
    assert "no such kernel" in str(error)


def test_what_is_left_out_is_held_against_everything(tmp_path, monkeypatch):
    rows = {"everything": {"real_tokens_per_s": 200.0}, "without bf16 (TF32)": {"real_tokens_per_s": 50.0}}
    figures, _ = written(tmp_path, monkeypatch, {"ablation": rows | {"without x": {"not measured": "out of memory"}}})
    assert figures["without_bf16_tf32_of_everything_share"].value == 0.25
    assert "without_x_of_everything_share" not in figures


def test_fast_ways_are_held_against_the_plain_way_of_the_same_precision(tmp_path, monkeypatch):
    kernels = {"masked_to_fp32_distance_share": 0.01, "varlen_to_fp32_distance_share": 0.012}
    found = {"kernels": kernels, "documents": {"varlen_largest_change_of_others": 0.5}}
    figures, _ = written(tmp_path, monkeypatch, found, stage=maths)
    assert figures["varlen_to_plain_distance_ratio"].value == pytest.approx(1.2)
    assert figures["compiled_to_plain_distance_ratio"].label == "not measured"
    change = figures["documents_varlen_largest_change_of_others"]
    assert (change.value, change.expected) == (0.5, 0.0)


@pytest.mark.soak
def test_all_parts_run_in_small_without_a_gpu(tmp_path, monkeypatch):
    # Machine code takes a minute to compile, and is not what runs on a GPU.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    data = write_learnable_corpus(tmp_path / "data", real_lengths(2000, 0), real_lengths(64, 1), vocab_size=1000)
    out = tmp_path / "train.json"
    assert train_program.main(["--tiny", "--device", "cpu", "--data", str(data), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    for part in train_program.PARTS:
        assert "not measured" not in found[part], found[part]
    assert all(rates for rates in found["rivals"]["real_tokens_per_s"].values())
    assert set(found["ablation"]) == set(train_program.ABLATIONS)
    assert all("real_tokens_per_s" in one for one in found["ablation"].values())
