import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.commands.data import app
from autotune.core.dataset import HISTOGRAM_EDGES
from trainer.dataset import read_manifest


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    if shutil.which("gcc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("gcc is not installed")
        pytest.skip("gcc is not installed")
    directory = tmp_path_factory.mktemp("programs")
    (directory / "source.c").write_text("int main(int argc, char **argv) { return argc * 3 + argv[0][0]; }")
    subprocess.run(["gcc", "-o", directory / "program", directory / "source.c"], check=True)
    for number in range(7):
        (directory / f"broken\x1b{number}").write_bytes(b"\x7fELF")
    return directory


def run(*arguments):
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_the_result_is_told_the_next_command_last_and_what_was_rejected_on_stderr_without_control_characters(
    programs, tmp_path
):
    result = run(f"elf:{programs}", "--out", tmp_path / "my data")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == f"next: autotune tune --model bert-mini --data '{tmp_path / 'my data'}' --memory 1GiB"
    for said in ("raw -> tokens", "masks not stored", "for validation", "duplicates dropped", "0.0 %", "###"):
        assert said in result.stdout
    assert max(map(len, lines[:-1])) <= 100
    assert result.stderr.count("left out '") == 5
    assert f"left out 2 more (listed in {tmp_path / 'my data' / 'rejects.jsonl'})" in result.stderr
    assert "\x1b" not in result.stderr
    assert "left out '" not in result.stdout
    assert len((tmp_path / "my data" / "rejects.jsonl").read_text().splitlines()) == 7
    told = json.loads(run(f"elf:{programs}", "--out", tmp_path / "data", "--json").stdout)
    manifest = read_manifest(tmp_path / "data")
    assert told["path"] == str(tmp_path / "data")
    assert told["dataset_hash"] == manifest.dataset_hash
    assert (told["samples"], told["tokens"]) == (manifest.train.samples, manifest.train.tokens)
    assert told["validation_samples"] == manifest.validation.samples
    assert told["raw_bytes"] == (programs / "program").stat().st_size
    assert told["reduction"] == 1 - told["token_bytes"] / told["raw_bytes"]
    assert told["mask_bytes_not_stored"] == told["token_bytes"] // 2
    assert told["rejected"] == 7
    assert Path(told["rejects"]).is_file()
    assert told["seconds"] > 0


def test_a_tokenizer_that_knows_little_of_the_data_is_mentioned_and_progress_says_the_rate(tmp_path):
    (tmp_path / "lines.txt").write_text("".join(f"word{number}\n" for number in range(1000)))
    few = ("--tokenizer", "wordlevel", "--vocab-size", 64)
    assert "does not know 9" in run(f"text:{tmp_path}", "--out", tmp_path / "few", *few).stderr
    err = run(f"text:{tmp_path}", "--out", tmp_path / "all").stderr
    assert "does not know" not in err
    assert re.search(r"extract samples: 100 % .* of .*iB, .*iB/s", err)


def test_text_becomes_byte_pairs_with_a_vocabulary_that_is_a_multiple_of_64(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {n} of some text\n" for n in range(500)))
    result = run(f"text:{tmp_path / 'a.txt'}", "--out", tmp_path / "data", "--vocab-size", "300", "--json")
    told = json.loads(result.stdout)
    assert told["vocab_size"] == 320
    assert told["unknown_tokens"] == 0
    assert told["samples"] + told["validation_samples"] == 500
    manifest = read_manifest(tmp_path / "data")
    assert manifest.source.kinds == ["text"]
    assert sum(manifest.train.length_histogram.counts) == told["samples"]
    assert manifest.train.length_histogram.edges == list(HISTOGRAM_EDGES)
    options = ["--validation-share", "0", "--tokenizer", "wordlevel", "--max-samples", "7", "--json"]
    assert json.loads(run(f"text:{tmp_path / 'a.txt'}", "--out", tmp_path / "few", *options).stdout)["samples"] == 7


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["elf:/no/such/place"], 3), (["exe:/usr/bin"], 3),
        (["elf:/usr/bin", "--tokenizer", "t.json", "--vocab-size", "99"], 2),
        (["elf:/usr/bin", "--scheduler", "tcp://127.0.0.1:1", "--slurm-workers", "site.toml"], 2),
        (["elf:/usr/bin", "--slurm-workers", "site.toml", "--slurm="], 2),
        (["elf:/usr/bin", "--wait"], 2),
        *((["elf:/usr/bin", name, value], 2) for name, value in (
            ("--max-samples", 0), ("--workers", 0), ("--vocab-size", 5), ("--validation-share", 0.9), ("--long", "x"),
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_before_anything_is_made(tmp_path, says, arguments, code):
    says("data", "prepare", *arguments, "--out", tmp_path / "data", code=code)
    assert list(tmp_path.iterdir()) == []


def test_help_needs_none_of_the_heavy_libraries():
    heavy = "('numpy', 'tokenizers', 'capstone', 'distributed', 'pyarrow', 'torch')"
    code = f"import sys, autotune.commands.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
