import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import run
from autotune.corpus.command import _staged_text, app
from autotune.corpus.values import HISTOGRAM_EDGES
from testbed.datasets import write_dataset
from trainer.data.dataset import read_manifest
from trainer.staging.copying import CopyFigures
from trainer.staging.stage import Staged


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    shutil.copy("/bin/true", directory / "program")
    for number in range(7):
        (directory / f"broken\x1b{number}").write_bytes(b"\x7fELF")
    return directory


def prepare(*arguments):
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_the_result_is_told_the_next_command_last_and_rejects_on_stderr_without_control_characters(
    programs, tmp_path
):
    result = prepare(f"elf:{programs}", "--out", tmp_path / "my data")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert (
        lines[-1]
        == f"next: autotune tune --model bert-mini --data '{tmp_path / 'my data'}'"
    )
    for said in (
        "raw -> tokens",
        "masks not stored",
        "for validation",
        "duplicates dropped",
        "0.0 %",
        "###",
    ):
        assert said in result.stdout
    assert max(map(len, lines[:-1])) <= 100
    assert result.stderr.count("skipped '") == 5
    assert (
        f"skipped 2 more (listed in {tmp_path / 'my data' / 'rejects.jsonl'})"
        in result.stderr
    )
    assert "\x1b" not in result.stderr
    assert "skipped '" not in result.stdout
    assert len((tmp_path / "my data" / "rejects.jsonl").read_text().splitlines()) == 7
    told = json.loads(
        prepare(f"elf:{programs}", "--out", tmp_path / "data", "--json").stdout
    )
    manifest = read_manifest(tmp_path / "data")
    assert (told["path"], told["dataset_hash"]) == (
        str(tmp_path / "data"),
        manifest.dataset_hash,
    )
    assert (told["samples"], told["tokens"]) == (
        manifest.train.samples,
        manifest.train.tokens,
    )
    assert told["validation_samples"] == manifest.validation.samples
    assert told["raw_bytes"] == (programs / "program").stat().st_size
    assert told["reduction"] == 1 - told["token_bytes"] / told["raw_bytes"]
    assert told["mask_bytes_not_stored"] == told["token_bytes"] // 2
    assert told["rejected"] == 7
    assert Path(told["rejects"]).is_file()
    assert told["seconds"] > 0


def test_a_tokenizer_that_knows_little_of_the_data_is_mentioned_and_progress_says_the_rate(
    tmp_path,
):
    (tmp_path / "lines.txt").write_text(
        "".join(f"word{number}\n" for number in range(1000))
    )
    few = ("--tokenizer", "wordlevel", "--vocab-size", 64)
    assert (
        "does not know 9"
        in prepare(f"text:{tmp_path}", "--out", tmp_path / "few", *few).stderr
    )
    err = prepare(f"text:{tmp_path}", "--out", tmp_path / "all").stderr
    assert "does not know" not in err
    assert re.search(r"extract samples: 100 % .* of .*iB, .*iB/s", err)


def test_text_becomes_byte_pairs_with_a_vocabulary_that_is_a_multiple_of_64(tmp_path):
    (tmp_path / "a.txt").write_text(
        "".join(f"line {n} of some text\n" for n in range(500))
    )
    result = prepare(
        f"text:{tmp_path / 'a.txt'}",
        "--out",
        tmp_path / "data",
        "--vocab-size",
        "300",
        "--json",
    )
    told = json.loads(result.stdout)
    assert (told["vocab_size"], told["unknown_tokens"]) == (320, 0)
    assert told["samples"] + told["validation_samples"] == 500
    manifest = read_manifest(tmp_path / "data")
    assert manifest.source.kinds == ["text"]
    assert sum(manifest.train.length_histogram.counts) == told["samples"]
    assert manifest.train.length_histogram.edges == list(HISTOGRAM_EDGES)
    options = [
        "--validation-share",
        "0",
        "--tokenizer",
        "wordlevel",
        "--max-samples",
        "7",
        "--json",
    ]
    assert (
        json.loads(
            prepare(
                f"text:{tmp_path / 'a.txt'}", "--out", tmp_path / "few", *options
            ).stdout
        )["samples"]
        == 7
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["elf:/no/such/place"], 3),
        (["exe:/usr/bin"], 3),
        (["elf:/usr/bin", "--tokenizer", "t.json", "--vocab-size", "99"], 2),
        (
            [
                "elf:/usr/bin",
                "--scheduler",
                "tcp://127.0.0.1:1",
                "--slurm-workers",
                "site.toml",
            ],
            2,
        ),
        (["elf:/usr/bin", "--slurm-workers", "site.toml", "--slurm="], 2),
        *(
            (["elf:/usr/bin", name, value], 2)
            for name, value in (
                ("--max-samples", 0),
                ("--workers", 0),
                ("--vocab-size", 5),
                ("--validation-share", 0.9),
                ("--long", "x"),
            )
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_made(
    tmp_path, says, arguments, code
):
    says("data", "prepare", *arguments, "--out", tmp_path / "data", code=code)
    assert list(tmp_path.iterdir()) == []


def test_counts_the_drawn_histogram_and_rows_fit_a_terminal_and_json_has_the_manifest_as_well(
    says, make_dataset
):
    directory = make_dataset(
        [[5] * (1 + number % 60) for number in range(500)], validation=[[5, 6]]
    )
    out = says("data", "inspect", directory, "--seq-length", "64")
    for said in (
        "500 samples",
        "1 samples, 2 tokens",
        "###",
        "packing gain",
        "seq length",
        "next: autotune data verify",
    ):
        assert said in out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    told = json.loads(
        says(
            "data",
            "inspect",
            directory,
            "--seq-length",
            "60",
            "--seq-length",
            "120",
            "--json",
        )
    )
    assert (told["samples"], told["manifest"]["used_vocab_size"]) == (500, 500)
    assert [row["seq_length_tokens"] for row in told["rows"]] == [60, 120]
    assert told["rows"][1]["packing_gain"] > told["rows"][0]["packing_gain"] > 1.5


def test_every_fault_of_a_damaged_dataset_is_named_and_ends_with_3(
    says, capsys, make_dataset
):
    whole = make_dataset([[5, 6], [7]])
    manifest = json.loads((whole / "manifest.json").read_text())
    manifest["source"]["token_bytes"] = 6
    (whole / "manifest.json").write_text(json.dumps(manifest))
    assert "is intact: 2 samples, 4 files" in says("data", "verify", whole)
    path = whole / "train-tokens-00000.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 2
    path.write_bytes(content)
    assert run(["data", "verify", str(whole)]) == 3
    told = capsys.readouterr()
    assert "'train-tokens-00000.npy': id 519 at position 2 is not below 500" in told.out
    assert "'train-tokens-00000.npy': its SHA-256 is" in told.out
    assert "is corrupt: 2 faults in 'train-tokens-00000.npy'" in told.err
    path.unlink()
    (whole / "stray").write_text("")
    assert run(["data", "verify", str(whole), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert [fault["file"] for fault in found["faults"]] == [
        "stray",
        "train-tokens-00000.npy",
    ]
    assert found["path"] == str(whole)


def test_the_copy_is_told_with_its_rates_and_what_it_is_worth_only_where_they_were_measured(
    says, tmp_path, capsys
):
    (tmp_path / "local").mkdir()
    stage = ["data", "stage", "--to", str(tmp_path / "local")]
    source = str(write_dataset(tmp_path / "source", [[5] * 30] * 100))
    assert run([*stage, source]) == 0
    told = capsys.readouterr()
    for said in (
        "copied",
        "/s; one thread reads",
        "measured, one reader at random, cold",
        "breaks even",
        "AUTOTUNE_DATA=",
    ):
        assert said in told.out
    assert "is on the same file system" in told.err
    again = says(*stage, source)
    assert "is complete; another process copied it" in again
    assert "/s" not in again
    assert json.loads(says(*stage, source, "--json"))["copied"] is None
    out = says(
        *stage, write_dataset(tmp_path / "empty", [], shards=0, validation=[[5] * 30])
    )
    assert "copied" in out
    assert "breaks even" not in out
    assert "one sample" not in out
    last = write_dataset(tmp_path / "other", [[6] * 30] * 100)
    assert json.loads(says(*stage, last, "--json"))["copied"]["size_bytes"] > 0


@pytest.mark.parametrize(
    ("source_s", "said"),
    [(1e-3, "after 2.00 epochs"), (1e-4, "never: the copy is not faster")],
)
def test_what_the_copy_is_worth_is_said_either_way(source_s, said):
    figures = CopyFigures(size_bytes=10, seconds=1.8, read_s=1.0, write_s=1.0)
    staged = Staged(
        directory=Path("/local"),
        dataset_hash="",
        samples=1000,
        copied=figures,
        source_s_per_sample=source_s,
        local_s_per_sample=1e-4,
    )
    assert f"breaks even  {said}" in _staged_text(staged, 2.0)
