import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.commands.data import app
from autotune.errors import BadInput, UsageError
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


def test_the_result_is_told_and_the_next_command_comes_last(programs, tmp_path):
    result = run(f"elf:{programs}", "--out", tmp_path / "my data")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[-1] == f"next: autotune probe --model bert-mini --data '{tmp_path / 'my data'}' --memory 1GiB"
    for said in ("programs -> tokens", "distinct functions", "duplicates dropped", "unknown tokens", "0.0 %", "###"):
        assert said in result.stdout


def test_rejected_files_are_named_on_stderr_without_their_control_characters(programs, tmp_path):
    result = run(f"elf:{programs}", "--out", tmp_path / "data")
    assert result.stderr.count("left out '") == 5
    assert "left out 2 more files" in result.stderr
    assert "\x1b" not in result.stderr
    assert "left out '" not in result.stdout


def test_json_is_one_object_and_nothing_else(programs, tmp_path):
    result = run(f"elf:{programs}", "--out", tmp_path / "data", "--json")
    told = json.loads(result.stdout)
    manifest = read_manifest(tmp_path / "data")
    assert told["path"] == str(tmp_path / "data")
    assert told["dataset_hash"] == manifest.dataset_hash
    assert (told["samples"], told["tokens"]) == (manifest.samples, manifest.tokens)
    assert told["raw_bytes"] == (programs / "program").stat().st_size
    assert told["reduction"] == 1 - told["token_bytes"] / told["raw_bytes"]
    assert len(told["rejected"]) == 7
    assert told["seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["elf:/no/such/place"], BadInput),
        (["exe:/usr/bin"], BadInput),
        (["elf:/usr/bin", "--tokenizer", "t.json", "--vocab-size", "99"], UsageError),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_made(tmp_path, arguments, error):
    result = run(*arguments, "--out", tmp_path / "data")
    assert isinstance(result.exception, error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [["--max-functions", "0"], ["--workers", "0"], ["--vocab-size", "5"]])
def test_numbers_out_of_range_are_usage_errors(tmp_path, option):
    assert run("elf:/usr/bin", "--out", tmp_path / "data", *option).exit_code == 2


def test_help_needs_none_of_the_heavy_libraries():
    heavy = "('numpy', 'tokenizers', 'capstone')"
    code = f"import sys, autotune.commands.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
