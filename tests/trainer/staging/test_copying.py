import os
from pathlib import Path

import pytest

from testbed.datasets import write_dataset
from tests.system.faults.corpora import content
from tests.trainer.staging.damage import (
    append_line,
    change_manifest,
    empty,
    move_and_link,
)
from trainer.data.manifest import read_manifest
from trainer.errors import BadConfig
from trainer.staging.copying import copy_files, dataset_files, seconds_per_sample


def copy(source, local, *, change=lambda: None, update=lambda done, total, note: None):
    """Copy the dataset; ``change`` is called once its files are listed."""
    manifest = read_manifest(source)
    files = dataset_files(source, manifest)
    change()
    return copy_files(files, source, local, manifest, update)


def test_copies_all_files_of_a_dataset_only(source, local):
    (source / "rejects.jsonl").write_text("{}\n")
    (source / "prepared.json").write_text("{}\n")
    other = source / "other"
    other.write_text("no part of the dataset")
    figures = copy(source, local)
    other.unlink()
    assert content(local) == content(source)
    assert figures.size_bytes == sum(len(file) for file in content(source).values())
    assert min(figures.read_s, figures.write_s, figures.seconds) > 0


def test_copy_reports_progress_in_bytes(source, local):
    updates = []
    figures = copy(
        source,
        local,
        update=lambda done, total, note: updates.append((done, total, note)),
    )
    copied_bytes = [done for done, _, _ in updates]
    assert copied_bytes == sorted(copied_bytes)
    done, total, note = updates[-1]
    assert done == total == figures.size_bytes
    assert note.endswith(" MiB/s")


@pytest.mark.parametrize(
    "name", ["train-tokens-00002.npy", "validation-offsets-00000.npy", "tokenizer.json"]
)
def test_names_file_with_another_hash(source, local, name):
    raw = bytearray((source / name).read_bytes())
    raw[-1] ^= 1
    (source / name).write_bytes(raw)
    with pytest.raises(BadConfig, match=rf"source/{name}: its SHA-256 is") as raised:
        copy(source, local)
    assert raised.value.next_step.endswith(f"autotune data verify {source}")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        pytest.param("rejects.jsonl", append_line, "became longer", id="longer"),
        pytest.param("rejects.jsonl", empty, "became shorter", id="shorter"),
        pytest.param("rejects.jsonl", Path.unlink, "No such file", id="missing"),
        pytest.param(
            "manifest.json",
            change_manifest,
            "changed while it was copied",
            id="other manifest",
        ),
        pytest.param(
            "tokenizer.json",
            move_and_link,
            "Too many levels of symbolic links",
            id="link",
        ),
    ],
)
def test_notices_source_that_changes_meanwhile(source, local, name, change, message):
    (source / "rejects.jsonl").write_text("{}\n" * 20)
    with pytest.raises(BadConfig, match=rf"source/{name}: {message}"):
        copy(source, local, change=lambda: change(source / name))


def link_outside(path):
    """Link to the file that the test has moved out of the dataset."""
    path.symlink_to(path.parent.parent / "outside")


@pytest.mark.parametrize(
    ("create", "message"),
    [
        pytest.param(None, "No such file", id="missing"),
        pytest.param(link_outside, "is not a regular file", id="link"),
        pytest.param(os.mkfifo, "is not a regular file", id="pipe"),
    ],
)
def test_rejects_what_is_not_a_file(source, local, create, message):
    offsets = source / "train-offsets-00000.npy"
    offsets.rename(source.parent / "outside")
    if create is not None:
        create(offsets)
    with pytest.raises(BadConfig, match=rf"train-offsets-00000\.npy: {message}"):
        copy(source, local)
    assert list(local.iterdir()) == []


def test_measuring_a_dataset_changes_nothing(source):
    before = content(source)
    assert seconds_per_sample(source) > 0
    assert content(source) == before


def test_time_per_sample_is_unknown_without_samples(tmp_path):
    dataset = write_dataset(tmp_path / "empty", [], shards=0, validation=[[7]])
    assert seconds_per_sample(dataset) is None
