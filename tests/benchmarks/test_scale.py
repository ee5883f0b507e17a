import json

import pytest

from benchmarks import scale
from tests.simulators import corpora
from trainer.dataset import TokenDataset


@pytest.mark.slow
def test_both_sizes_are_started_cold_in_turn_and_read_to_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale, "REPEATS", 1)
    monkeypatch.setattr(scale, "FEWER_SAMPLES", 3000)
    path = tmp_path / "scale.json"
    arguments = ["--samples", "20000", "--batches", "5", "--dir", str(tmp_path), "--json", str(path)]
    assert scale.main(arguments) in (0, 1)
    figures = json.loads(path.read_text())["figures"]
    assert figures["samples"] == {"large": 20_000, "small": 3000}
    assert [len(runs) for runs in figures["runs"].values()] == [1, 1]
    assert figures["runs"]["large"][-1]["rest_real_tokens_per_s"] > 0
    assert "scale_first_batch_ratio figure=" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]


def test_lengths_are_those_of_real_functions():
    lengths = corpora.real_lengths(50_000, seed=0)
    assert 180 < sorted(lengths)[25_000] < 210
    assert 0.18 < (lengths >= 510).mean() < 0.26


def test_a_sparse_dataset_takes_no_room_and_reads_as_zeros(tmp_path):
    lengths = corpora.real_lengths(3000, seed=0)
    directory = corpora.write_sparse_corpus(tmp_path / "data", lengths)
    dataset = TokenDataset.open(directory)
    assert len(dataset) == 3000
    assert len(dataset.read(7)) == lengths[7]
    assert not dataset.read(7).any()
    (tokens,) = directory.glob("train-tokens-*")
    assert tokens.stat().st_blocks * 512 < 100_000
