"""``autotune data``: inspect, verify and stage; preparing has a file of its own."""

import json
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.commands.data import _staged_text
from tests.conftest import write_dataset
from trainer.copying import CopyFigures
from trainer.stage import Staged


@pytest.fixture
def whole(tmp_path):
    """A dataset that verifies."""
    directory = write_dataset(tmp_path / "data", [[5, 6], [7]])
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["token_bytes"] = 6
    path.write_text(json.dumps(manifest))
    return directory


def test_counts_the_drawn_histogram_and_rows_fit_a_terminal(says, tmp_path):
    samples = [[5] * (1 + number % 60) for number in range(500)]
    out = says("data", "inspect", write_dataset(tmp_path / "data", samples, validation=[[5, 6]]), "--row-tokens", "64")
    for said in (
        "500 samples",
        "1 samples, 2 tokens",
        "###",
        "packing gain",
        "row tokens",
        "next: autotune data verify",
    ):
        assert said in out
    assert max(map(len, out.splitlines()[:-1])) <= 100


def test_json_holds_the_manifest_and_the_figures_of_every_row_length(says, tmp_path):
    directory = write_dataset(tmp_path / "data", [[5] * 30] * 10)
    told = json.loads(says("data", "inspect", directory, "--row-tokens", "32", "--row-tokens", "64", "--json"))
    assert told["samples"] == 10
    assert told["manifest"]["used_vocab_size"] == 500
    assert [row["row_tokens"] for row in told["rows"]] == [32, 64]
    assert told["rows"][1]["packing_gain"] == 2.0


def test_a_whole_dataset_is_said_to_be_whole(says, whole):
    assert "is whole: 2 samples, 4 files" in says("data", "verify", whole)


def test_every_fault_of_a_damaged_dataset_is_named_and_ends_with_3(capsys, whole):
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


@pytest.fixture
def stage(tmp_path, says):
    """Stage a dataset of these samples."""
    (tmp_path / "local").mkdir()

    def call(samples, *options, **more):
        if not (tmp_path / "source").exists():
            write_dataset(tmp_path / "source", samples, **more)
        return says("data", "stage", tmp_path / "source", "--to", tmp_path / "local", *options)

    return call


SAMPLES = [[5] * 30] * 100


def test_the_copy_is_told_with_its_rates_and_what_it_is_worth(stage, tmp_path, capsys):
    source, local = write_dataset(tmp_path / "source", SAMPLES), str(tmp_path / "local")
    assert run(["data", "stage", str(source), "--to", local]) == 0
    told = capsys.readouterr()
    for said in ("copied", "/s; one thread reads", "measured, one reader at random, cold", "breaks even",
                 "AUTOTUNE_DATA="):  # fmt: skip
        assert said in told.out
    assert "lies on the same file system" in told.err
    again = stage(SAMPLES)
    assert "is there; this process copied nothing" in again
    assert "/s" not in again


def test_json_says_nothing_of_a_bandwidth_that_was_not_measured(stage):
    first, again = (json.loads(stage(SAMPLES, "--json")) for _ in range(2))
    assert first["copied"]["size_bytes"] > 0
    assert again["copied"] is None
    assert again["directory"] == first["directory"]


def test_nothing_is_said_of_worth_where_there_is_no_sample_to_read(stage):
    out = stage([], shards=0, validation=[[5] * 30])
    assert "copied" in out
    assert "breaks even" not in out
    assert "one sample" not in out


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
