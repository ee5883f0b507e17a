"""Copies of the files of a dataset, whose hashes are verified meanwhile."""

import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from testbed.datasets import write_dataset
from tests.system.faults.corpora import content
from tests.trainer.staging.damage import (
    append_line,
    change_manifest,
    flip_last_bit,
    move_and_link,
    remove_content,
)
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import read_manifest
from trainer.staging.copying import copy_files, dataset_files
from trainer.staging.read_speed import seconds_per_sample

OFFSETS = "train-offsets-00000.npy"
"""File of the dataset that some tests replace."""


def do_nothing(*_):
    pass


def copy(source, local, *, change_source=do_nothing, update=do_nothing):
    """Copy a dataset.

    ``change_source`` is called once the files of the dataset are listed, and ``update``
    with the progress.
    """
    manifest = read_manifest(source)
    files = dataset_files(source, manifest)
    change_source()
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
    update = Mock()
    figures = copy(source, local, update=update)
    copied_bytes = [call.args[0] for call in update.call_args_list]
    assert copied_bytes == sorted(copied_bytes)
    last_copied_bytes, total_bytes, note = update.call_args.args
    assert last_copied_bytes == total_bytes == figures.size_bytes
    assert note.endswith(" MiB/s")


@pytest.mark.parametrize(
    "name", ["train-tokens-00002.npy", "validation-offsets-00000.npy", "tokenizer.json"]
)
def test_names_file_with_another_hash(source, local, name):
    flip_last_bit(source / name)
    with pytest.raises(BadConfig, match=rf"source/{name}: its SHA-256 is") as raised:
        copy(source, local)
    assert raised.value.next_step.endswith(f"autotune data verify {source}")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        pytest.param("rejects.jsonl", append_line, "became longer", id="longer"),
        pytest.param("rejects.jsonl", remove_content, "became shorter", id="shorter"),
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
        copy(source, local, change_source=lambda: change(source / name))


@pytest.fixture
def file_outside(source):
    """Offsets that were moved out of the dataset, whose directory lacks them."""
    outside = source.parent / "outside"
    (source / OFFSETS).rename(outside)
    return outside


def assert_not_copied(source, local, *, message):
    with pytest.raises(BadConfig, match=f"{re.escape(OFFSETS)}: {message}"):
        copy(source, local)
    assert list(local.iterdir()) == []


@pytest.mark.usefixtures("file_outside")
def test_rejects_missing_file(source, local):
    assert_not_copied(source, local, message="No such file")


def test_rejects_link_to_a_file(source, local, file_outside):
    (source / OFFSETS).symlink_to(file_outside)
    assert_not_copied(source, local, message="is not a regular file")


@pytest.mark.usefixtures("file_outside")
def test_rejects_pipe_in_place_of_a_file(source, local):
    os.mkfifo(source / OFFSETS)
    assert_not_copied(source, local, message="is not a regular file")


def test_measuring_a_dataset_changes_nothing(source):
    before = content(source)
    assert seconds_per_sample(source) > 0
    assert content(source) == before


def test_time_per_sample_is_unknown_without_samples(tmp_path):
    dataset = write_dataset(tmp_path / "empty", [], shards=0, validation=[[7]])
    assert seconds_per_sample(dataset) is None
