import functools
import json

import pytest
import torch

from benchmarks.gpu import train


@pytest.mark.soak
def test_all_parts_run_in_small_without_a_gpu_and_say_what_they_are(tmp_path, capsys, monkeypatch):
    # Machine code takes a minute to compile, and is not what runs on a GPU.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    code = train.main(["--tiny", "--json", str(tmp_path / "train.json")])
    found = json.loads((tmp_path / "train.json").read_text())
    assert found["device"] == "cpu"
    assert found["tiny"]
    for part in train.PARTS:
        assert "not measured" not in found[part], found[part]
    assert found["same"]["gradient distance, varlen"] < 1e-6
    assert found["same"]["recompilations"] == 0
    assert all(rates for rates in found["rivals"]["real_tokens_per_s"].values())
    assert set(found["ablation"]) == set(train.ABLATIONS)
    assert all("real_tokens_per_s" in one for one in found["ablation"].values())
    # A CPU has no peak in the table, so two bars stay open whatever the ratios are.
    assert code in {1, 2}
    assert "gpu_train_bert_120m_mfu_share figure=n/a bar>=0.45 not measured" in capsys.readouterr().out


def test_a_part_that_fails_leaves_its_bars_open_and_the_others_whole():
    bars = {bar.name: bar for bar in train.make_bars({"mfu": {"not measured": "x"}})}
    assert all(bar.holds is None for bar in bars.values())
    rates = {"ours": [30.0, 31.0, 32.0], "paper-style": [2.0, 2.0, 2.0]}
    bars = {bar.name: bar for bar in train.make_bars({"rivals": {"real_tokens_per_s": rates}})}
    assert bars["gpu_train_against_paper_ratio"].figure == 15.5
    assert bars["gpu_train_against_hf_trainer_ratio"].figure is None
