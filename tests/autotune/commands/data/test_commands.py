import json
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.commands.data import _staged_text
from tests.conftest import write_dataset
from trainer.copying import CopyFigures
from trainer.stage import Staged


def test_counts_the_drawn_histogram_and_rows_fit_a_terminal_and_json_has_the_manifest_as_well(says, make_dataset):
    directory = make_dataset([[5] * (1 + number % 60) for number in range(500)], validation=[[5, 6]])
    out = says("data", "inspect", directory, "--row-tokens", "64")
    for said in (
        "500 samples", "1 samples, 2 tokens", "###", "packing gain", "row tokens", "next: autotune data verify",
    ):  # fmt: skip
        assert said in out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    told = json.loads(says("data", "inspect", directory, "--row-tokens", "60", "--row-tokens", "120", "--json"))
    assert (told["samples"], told["manifest"]["used_vocab_size"]) == (500, 500)
    assert [row["row_tokens"] for row in told["rows"]] == [60, 120]
    assert told["rows"][1]["packing_gain"] > told["rows"][0]["packing_gain"] > 1.5


def test_every_fault_of_a_damaged_dataset_is_named_and_ends_with_3(says, capsys, make_dataset):
    whole = make_dataset([[5, 6], [7]])
    manifest = json.loads((whole / "manifest.json").read_text())
    manifest["source"]["token_bytes"] = 6
    (whole / "manifest.json").write_text(json.dumps(manifest))
    assert "is whole: 2 samples, 4 files" in says("data", "verify", whole)
    path = whole / "train-tokens-00000.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 2
    path.write_bytes(content)
    assert run(["data", "verify", str(whole)]) == 3
    told = capsys.readouterr()
    assert "'train-tokens-00000.npy': id 519 at place 2 is not below 500" in told.out
    assert "'train-tokens-00000.npy': its SHA-256 is" in told.out
    assert "is damaged: 2 faults in 'train-tokens-00000.npy'" in told.err
    path.unlink()
    (whole / "stray").write_text("")
    assert run(["data", "verify", str(whole), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [fault["file"] for fault in found["faults"]] == ["stray", "train-tokens-00000.npy"]
    assert found["path"] == str(whole)


def test_the_copy_is_told_with_its_rates_and_what_it_is_worth_only_where_they_were_measured(says, tmp_path, capsys):
    (tmp_path / "local").mkdir()
    stage = ["data", "stage", "--to", str(tmp_path / "local")]
    source = str(write_dataset(tmp_path / "source", [[5] * 30] * 100))
    assert run([*stage, source]) == 0
    told = capsys.readouterr()
    for said in ("copied", "/s; one thread reads", "measured, one reader at random, cold", "breaks even",
                 "AUTOTUNE_DATA="):  # fmt: skip
        assert said in told.out
    assert "lies on the same file system" in told.err
    again = says(*stage, source)
    assert "is there; this process copied nothing" in again
    assert "/s" not in again
    assert json.loads(says(*stage, source, "--json"))["copied"] is None
    out = says(*stage, write_dataset(tmp_path / "empty", [], shards=0, validation=[[5] * 30]))
    assert "copied" in out
    assert "breaks even" not in out
    assert "one sample" not in out
    last = write_dataset(tmp_path / "other", [[6] * 30] * 100)
    assert json.loads(says(*stage, last, "--json"))["copied"]["size_bytes"] > 0


@pytest.mark.parametrize(
    ("source_s", "local_s", "said"),
    [
        (1e-3, 1e-4, "breaks even  after 2.00 epochs"),
        (1e-4, 1e-4, "breaks even  never: the copy is not faster to read than the source"),
    ],
)
def test_what_the_copy_is_worth_is_said_either_way(source_s, local_s, said):
    figures = CopyFigures(size_bytes=10, seconds=1.8, read_s=1.0, write_s=1.0)
    staged = Staged(
        directory=Path("/local"), dataset_hash="", samples=1000, copied=figures, source_s_per_sample=source_s,
        local_s_per_sample=local_s,
    )  # fmt: skip
    assert said in _staged_text(staged, 2.0)
