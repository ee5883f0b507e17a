import json

from typer.testing import CliRunner

from autotune.commands.data import app
from tests.conftest import write_dataset


def invoke(*arguments):
    return CliRunner().invoke(app, ["stage", *map(str, arguments)])


def test_the_copy_is_told_with_its_rates_and_what_it_is_worth(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
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
    assert "is there already" in again.stdout


def test_json_says_nothing_of_a_bandwidth_that_was_not_measured(tmp_path):
    source = write_dataset(tmp_path / "source", [[5] * 30] * 100)
    (tmp_path / "local").mkdir()
    first = json.loads(invoke(source, "--to", tmp_path / "local", "--json").stdout)
    again = json.loads(invoke(source, "--to", tmp_path / "local", "--json").stdout)
    assert first["copied"]
    assert first["bytes_per_s"] > 0
    assert not again["copied"]
    assert again["bytes_per_s"] is None
    assert again["path"] == first["path"]
