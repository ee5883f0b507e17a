import json

from typer.testing import CliRunner

from autotune.cli import run
from autotune.commands.data import app
from tests.conftest import write_dataset


def whole(tmp_path):
    directory = write_dataset(tmp_path / "data", [[5, 6], [7]])
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["token_bytes"] = 6
    path.write_text(json.dumps(manifest))
    return directory


def invoke(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_a_whole_dataset_is_said_to_be_whole(tmp_path):
    result = invoke(whole(tmp_path))
    assert result.exit_code == 0
    assert "is whole: 2 samples, 4 files" in result.stdout


def test_a_flipped_bit_ends_with_3_and_names_the_shard(tmp_path, capsys):
    directory = whole(tmp_path)
    path = directory / "train-tokens-00000.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 2
    path.write_bytes(content)
    assert run(["data", "verify", str(directory)]) == 3
    told = capsys.readouterr()
    assert "'train-tokens-00000.npy': id 519 at place 2 is not below 500" in told.out
    assert "'train-tokens-00000.npy': its SHA-256 is" in told.out
    assert "is damaged: 2 faults in 'train-tokens-00000.npy'" in told.err


def test_json_lists_every_fault(tmp_path):
    directory = whole(tmp_path)
    (directory / "train-tokens-00000.npy").unlink()
    (directory / "stray").write_text("")
    told = json.loads(invoke(directory, "--json").stdout)
    assert [fault["file"] for fault in told["faults"]] == ["stray", "train-tokens-00000.npy"]
    assert told["path"] == str(directory)
