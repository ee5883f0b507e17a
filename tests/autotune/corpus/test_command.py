import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.base.units import format_bytes
from autotune.cli import run
from autotune.corpus.command import _staged_text, app
from autotune.corpus.values import HISTOGRAM_EDGES
from testbed.datasets import write_dataset
from trainer.formats.manifest import read_manifest
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


def test_prints_result_with_next_command(programs, tmp_path):
    result = prepare(f"elf:{programs}", "--out", tmp_path / "my data")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert (
        lines[-1]
        == f"next: autotune tune --model bert-mini --data '{tmp_path / 'my data'}'"
    )
    for words in (
        "raw -> tokens",
        "masks not stored",
        "for validation",
        "duplicates dropped",
        "0.0 %",
        "###",
    ):
        assert words in result.stdout
    assert max(map(len, lines[:-1])) <= 100


def test_lists_rejects_on_stderr(programs, tmp_path):
    result = prepare(f"elf:{programs}", "--out", tmp_path / "my data")
    assert result.stderr.count("skipped '") == 5
    assert (
        f"skipped 2 more (listed in {tmp_path / 'my data' / 'rejects.jsonl'})"
        in result.stderr
    )
    assert "\x1b" not in result.stderr
    assert "skipped '" not in result.stdout
    assert len((tmp_path / "my data" / "rejects.jsonl").read_text().splitlines()) == 7


def test_json_matches_the_manifest(programs, tmp_path):
    printed = json.loads(
        prepare(f"elf:{programs}", "--out", tmp_path / "data", "--json").stdout
    )
    manifest = read_manifest(tmp_path / "data")
    assert (printed["path"], printed["dataset_hash"]) == (
        str(tmp_path / "data"),
        manifest.dataset_hash,
    )
    assert (printed["samples"], printed["tokens"]) == (
        manifest.train.samples,
        manifest.train.tokens,
    )
    assert printed["validation_samples"] == manifest.validation.samples
    assert printed["raw_bytes"] == (programs / "program").stat().st_size
    assert printed["reduction"] == 1 - printed["token_bytes"] / printed["raw_bytes"]
    assert printed["mask_bytes_not_stored"] == printed["token_bytes"] // 2
    assert printed["rejected"] == 7
    assert Path(printed["rejects"]).is_file()
    assert printed["seconds"] > 0


def test_compares_tokens_with_uncompressed_text(tmp_path):
    text = "".join(f"line {number} of a text that repeats\n" for number in range(4000))
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    out = tmp_path / "data"
    printed = prepare(f"text:{tmp_path / 'lines.txt.gz'}", "--out", out).stdout
    source = read_manifest(out).source
    assert source.raw_bytes < source.token_bytes < source.text_bytes
    # Line feeds end the samples and are not part of them.
    assert source.text_bytes == len(text) - text.count("\n")
    assert f"({format_bytes(source.text_bytes)} uncompressed)" in printed
    change = source.token_bytes / source.text_bytes - 1
    assert f"({100 * change:+.1f} %)" in printed


def test_warns_of_unknown_tokens(tmp_path):
    (tmp_path / "lines.txt").write_text(
        "".join(f"word{number}\n" for number in range(1000))
    )
    few = ("--tokenizer", "wordlevel", "--vocab-size", 64)
    assert (
        "does not know 9"
        in prepare(f"text:{tmp_path}", "--out", tmp_path / "few", *few).stderr
    )
    prepared = prepare(f"text:{tmp_path}", "--out", tmp_path / "all")
    assert "does not know" not in prepared.stderr


def test_warns_of_text_that_training_cuts_off(tmp_path):
    for number in range(6):
        text = " ".join(f"{number}w{word}" for word in range(3000))
        (tmp_path / f"{number}.txt").write_text(text)
    options = ("--text-unit", "file", "--vocab-size", 300, "--validation-share")
    err = prepare(f"text:{tmp_path}", "--out", tmp_path / "a", *options, 0.01).stderr
    assert re.search(r"cut off 9\d.* of the tokens at its default .* of 512;", err)
    assert "--max-tokens 510 --long split" in err
    assert "no validation samples: of 6 samples, 1" in err
    assert "--validation-share 0.5 --overwrite" in err

    split = ("--max-tokens", 510, "--long", "split")
    err = prepare(
        f"text:{tmp_path}", "--out", tmp_path / "b", *options, 0.5, *split
    ).stderr
    assert "warning" not in err


def test_progress_shows_the_rate(tmp_path):
    (tmp_path / "lines.txt").write_text("one line\nanother line\n" * 500)
    err = prepare(f"text:{tmp_path}", "--out", tmp_path / "all").stderr
    assert re.search(r"extract samples: 100 % .* of .*iB, .*iB/s", err)


def test_learns_byte_pairs_from_text(tmp_path):
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
    result_json = json.loads(result.stdout)
    assert (result_json["vocab_size"], result_json["unknown_tokens"]) == (320, 0)
    assert result_json["samples"] + result_json["validation_samples"] == 500
    manifest = read_manifest(tmp_path / "data")
    assert manifest.source.kinds == ["text"]
    assert sum(manifest.train.length_histogram.counts) == result_json["samples"]
    assert manifest.train.length_histogram.edges == list(HISTOGRAM_EDGES)


def test_limits_number_of_samples(tmp_path):
    (tmp_path / "a.txt").write_text(
        "".join(f"line {n} of some text\n" for n in range(500))
    )
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
def test_rejects_unusable_arguments(tmp_path, says, arguments, code):
    says("data", "prepare", *arguments, "--out", tmp_path / "data", code=code)
    assert list(tmp_path.iterdir()) == []


def test_inspect_fits_a_terminal(says, make_dataset):
    directory = make_dataset(
        [[5] * (1 + number % 60) for number in range(500)], validation=[[5, 6]]
    )
    out = says("data", "inspect", directory, "--seq-length", "64")
    for words in (
        "500 samples",
        "1 samples, 2 tokens",
        "###",
        "packing gain",
        "seq length",
        "next: autotune data verify",
    ):
        assert words in out
    assert max(map(len, out.splitlines()[:-1])) <= 100


def test_inspect_json_includes_the_manifest(says, make_dataset):
    directory = make_dataset(
        [[5] * (1 + number % 60) for number in range(500)], validation=[[5, 6]]
    )
    printed = json.loads(
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
    assert (printed["samples"], printed["manifest"]["used_vocab_size"]) == (500, 500)
    assert [row["seq_length_tokens"] for row in printed["rows"]] == [60, 120]
    assert printed["rows"][1]["packing_gain"] > printed["rows"][0]["packing_gain"] > 1.5


def test_verify_names_every_fault(says, capsys, make_dataset):
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
    output = capsys.readouterr()
    assert (
        "'train-tokens-00000.npy': id 519 at position 2 is not below 500" in output.out
    )
    assert "'train-tokens-00000.npy': its SHA-256 is" in output.out
    assert "is corrupt: 2 faults in 'train-tokens-00000.npy'" in output.err
    path.unlink()
    (whole / "stray").write_text("")
    assert run(["data", "verify", str(whole), "--json"]) == 3
    verification = json.loads(capsys.readouterr().out)
    assert [fault["file"] for fault in verification["faults"]] == [
        "stray",
        "train-tokens-00000.npy",
    ]
    assert verification["path"] == str(whole)


def test_stage_prints_its_rates(says, tmp_path, capsys):
    (tmp_path / "local").mkdir()
    stage = ["data", "stage", "--to", str(tmp_path / "local")]
    source = str(write_dataset(tmp_path / "source", [[5] * 30] * 100))
    assert run([*stage, source]) == 0
    output = capsys.readouterr()
    for words in (
        "copied",
        "/s; one thread reads",
        "measured, one reader at random, cold",
        "breaks even",
        "AUTOTUNE_DATA=",
    ):
        assert words in output.out
    assert "is on the same file system" in output.err


def test_second_copy_is_not_repeated(says, tmp_path):
    (tmp_path / "local").mkdir()
    stage = ["data", "stage", "--to", str(tmp_path / "local")]
    source = str(write_dataset(tmp_path / "source", [[5] * 30] * 100))
    says(*stage, source)
    again = says(*stage, source)
    assert "is complete; another process copied it" in again
    assert "/s" not in again
    assert json.loads(says(*stage, source, "--json"))["copied"] is None


def test_empty_split_does_not_break_even(says, tmp_path):
    (tmp_path / "local").mkdir()
    stage = ["data", "stage", "--to", str(tmp_path / "local")]
    out = says(
        *stage, write_dataset(tmp_path / "empty", [], shards=0, validation=[[5] * 30])
    )
    assert "copied" in out
    assert "breaks even" not in out
    assert "one sample" not in out


def test_stage_json_has_the_copied_size(says, tmp_path):
    (tmp_path / "local").mkdir()
    stage = ["data", "stage", "--to", str(tmp_path / "local")]
    last = write_dataset(tmp_path / "other", [[6] * 30] * 100)
    assert json.loads(says(*stage, last, "--json"))["copied"]["size_bytes"] > 0


@pytest.mark.parametrize(
    ("source_s", "words"),
    [(1e-3, "after 2.00 epochs"), (1e-4, "never: the copy is not faster")],
)
def test_says_when_the_copy_breaks_even(source_s, words):
    figures = CopyFigures(size_bytes=10, seconds=1.8, read_s=1.0, write_s=1.0)
    staged = Staged(
        directory=Path("/local"),
        dataset_hash="",
        samples=1000,
        copied=figures,
        source_s_per_sample=source_s,
        local_s_per_sample=1e-4,
    )
    assert f"breaks even  {words}" in _staged_text(staged, 2.0)
