"""Manifests that are rejected, and paths that hold no dataset."""

import errno
import json
from pathlib import Path

import pytest

from testbed.datasets import write_dataset
from trainer.formats.errors import BadConfig, UnreadableFile
from trainer.formats.manifest import read_manifest

SAMPLES = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


def test_directory_without_permission_is_unreadable(make_dataset, monkeypatch):
    def is_file(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    directory = make_dataset(SAMPLES)
    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(UnreadableFile, match="Permission denied"):
        read_manifest(directory)


def assert_rejected_after(change, directory, message):
    """Change a dataset's manifest, and check that it is rejected then."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(BadConfig, match=message):
        read_manifest(directory)


@pytest.mark.parametrize("name", ["../x.npy", "/etc/passwd", "a/b.npy", ".."])
def test_rejects_shard_outside_the_directory(make_dataset, name):
    def change(manifest):
        manifest["train"]["shards"][0]["tokens_file"] = name

    assert_rejected_after(change, make_dataset(SAMPLES), "tokens_file")


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(600, id="exceeds vocab_size"),
        pytest.param(4, id="below a special id"),
    ],
)
def test_rejects_impossible_vocabulary(make_dataset, size):
    def change(manifest):
        manifest["used_vocab_size"] = size

    assert_rejected_after(change, make_dataset(SAMPLES), "used_vocab_size")


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        pytest.param(
            {"counts": [1]}, "4 edges do not match 1 counts", id="counts are missing"
        ),
        pytest.param(
            {"edges": [0, 64, 32, 128]}, "edges must be ascending", id="edges descend"
        ),
    ],
)
def test_rejects_impossible_histogram(make_dataset, bins, message):
    def change(manifest):
        manifest["train"]["length_histogram"].update(bins)

    assert_rejected_after(change, make_dataset(SAMPLES), message)


def test_rejects_older_schema(make_dataset):
    def change(manifest):
        manifest["schema_version"] = 1

    assert_rejected_after(change, make_dataset(SAMPLES), "schema version 1")


@pytest.mark.parametrize(
    ("name", "message", "next_step"),
    [
        pytest.param(
            ".", "is not a dataset", "autotune data prepare", id="other directory"
        ),
        pytest.param(
            "corpus.txt",
            "is a raw file",
            "autotune data prepare text:{directory}/corpus.txt --out",
            id="raw file",
        ),
        pytest.param(
            "protein",
            "dataset not found",
            "Did you mean {directory}/proteins?",
            id="misspelt",
        ),
        pytest.param(
            "logs", "dataset not found", "autotune data prepare", id="missing"
        ),
    ],
)
def test_path_without_a_dataset_gets_a_remedy(tmp_path, name, message, next_step):
    write_dataset(tmp_path / "proteins", SAMPLES)
    (tmp_path / "corpus.txt").write_text("a line\n")
    with pytest.raises(BadConfig, match=message) as raised:
        read_manifest(tmp_path / name)
    assert next_step.format(directory=tmp_path) in raised.value.next_step
