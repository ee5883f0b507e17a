import json

from typer.testing import CliRunner

from autotune.commands.data import app
from tests.conftest import write_dataset


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_counts_the_drawn_histogram_and_rows_fit_a_terminal(tmp_path):
    samples = [[5] * (1 + number % 60) for number in range(500)]
    result = invoke(write_dataset(tmp_path / "data", samples, validation=[[5, 6]]), "--row-tokens", "64")
    assert result.exit_code == 0
    for said in (
        "500 samples",
        "1 samples, 2 tokens",
        "###",
        "packing gain",
        "row tokens",
        "next: autotune data verify",
    ):
        assert said in result.stdout
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 100


def test_json_holds_the_manifest_and_the_figures_of_every_row_length(tmp_path):
    directory = write_dataset(tmp_path / "data", [[5] * 30] * 10)
    told = json.loads(invoke(directory, "--row-tokens", "32", "--row-tokens", "64", "--json").stdout)
    assert told["samples"] == 10
    assert told["manifest"]["used_vocab_size"] == 500
    assert [row["row_tokens"] for row in told["rows"]] == [32, 64]
    assert told["rows"][1]["packing_gain"] == 2.0
