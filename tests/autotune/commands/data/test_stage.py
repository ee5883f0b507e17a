import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.commands.data import _staged_text, app
from tests.conftest import write_dataset
from trainer.copying import CopyFigures
from trainer.stage import Staged


def invoke(*arguments):
    return CliRunner().invoke(app, ["stage", *map(str, arguments)])


def test_the_copy_is_told_with_its_rates_and_what_it_is_worth(tmp_path):
    source = write_dataset(tmp_path / "source", [[5] * 30] * 100)
    (tmp_path / "local").mkdir()
    result = invoke(source, "--to", tmp_path / "local")
    assert result.exit_code == 0
    for said in (
        "copied",
        "/s; one thread reads",
        "measured, one reader at random, cold",
        "breaks even",
        "AUTOTUNE_DATA=",
    ):
        assert said in result.stdout
    assert "lies on the same file system" in result.stderr
    again = invoke(source, "--to", tmp_path / "local")
    assert "is there; this process copied nothing" in again.stdout
    assert "/s" not in again.stdout


def test_json_says_nothing_of_a_bandwidth_that_was_not_measured(tmp_path):
    source = write_dataset(tmp_path / "source", [[5] * 30] * 100)
    (tmp_path / "local").mkdir()
    first = json.loads(invoke(source, "--to", tmp_path / "local", "--json").stdout)
    again = json.loads(invoke(source, "--to", tmp_path / "local", "--json").stdout)
    assert first["copied"]["size_bytes"] > 0
    assert again["copied"] is None
    assert again["directory"] == first["directory"]


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
        directory=Path("/local"),
        dataset_hash="",
        samples=1000,
        copied=figures,
        source_s_per_sample=source_s,
        local_s_per_sample=local_s,
    )
    assert said in _staged_text(staged, 2.0)


def test_nothing_is_said_of_worth_where_there_is_no_sample_to_read(tmp_path):
    source = write_dataset(tmp_path / "source", [], shards=0, validation=[[5] * 30])
    (tmp_path / "local").mkdir()
    result = invoke(source, "--to", tmp_path / "local")
    assert "copied" in result.stdout
    assert "breaks even" not in result.stdout
    assert "one sample" not in result.stdout
