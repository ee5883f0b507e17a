import json

import pytest

from benchmarks import feed, scale
from testbed import corpora
from trainer.data.dataset import TokenDataset


@pytest.mark.slow
def test_both_sizes_start_cold(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale, "REPEATS", 1)
    monkeypatch.setattr(scale, "FEWER_SAMPLES", 3000)
    path = tmp_path / "scale.json"
    arguments = [
        "--samples",
        "20000",
        "--batches",
        "5",
        "--dir",
        str(tmp_path),
        "--json",
        str(path),
    ]
    assert scale.main(arguments) in (0, 1)
    figures = json.loads(path.read_text())["figures"]
    assert figures["samples"] == {"large": 20_000, "small": 3000}
    assert [len(runs) for runs in figures["runs"].values()] == [1, 1]
    assert figures["runs"]["large"][-1]["rest_real_tokens_per_s"] > 0
    assert "scale_first_batch_ratio figure=" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]


def test_sparse_dataset_takes_no_room(tmp_path):
    lengths = corpora.real_lengths(50_000, seed=0)
    assert 180 < sorted(lengths)[25_000] < 210
    assert 0.18 < (lengths >= 510).mean() < 0.26
    directory = corpora.write_sparse_corpus(tmp_path / "data", lengths[:3000])
    dataset = TokenDataset.open(directory)
    assert len(dataset) == 3000
    assert len(dataset.read(7)) == lengths[7]
    assert not dataset.read(7).any()
    (tokens,) = directory.glob("train-tokens-*")
    assert tokens.stat().st_blocks * 512 < 100_000


def test_bars_compare_contenders_of_one_run(tmp_path, capsys):
    path = tmp_path / "feed.json"
    code = feed.main(
        [
            "--samples",
            "600",
            "--repeats",
            "1",
            "--window-s",
            "0.01",
            "--json",
            str(path),
        ]
    )
    output = capsys.readouterr().out
    content = json.loads(path.read_text())
    assert code in (0, 1)
    rates = content["rates"]
    assert len(rates) == 8
    assert all(len(figures["samples_per_s"]) == 1 for figures in rates.values())
    bars = {bar["name"]: bar for bar in content["bars"]}
    plain = (
        rates["padded, full rows"]["samples_per_s"][0]
        / rates["plain, full rows"]["samples_per_s"][0]
    )
    assert bars["feed_against_plain_ratio"]["figure"] == plain
    assert bars["feed_packing_efficiency_share"]["figure"] > 0.98
    assert "feed_packed_real_tokens_ratio figure=" in output.splitlines()[-2]


def test_packing_needs_full_samples():
    # Without full samples never better than with them.
    packed = feed.packing_efficiency(5000)
    assert packed["padded"] < packed["without_full_samples"] <= packed["all"] <= 1
