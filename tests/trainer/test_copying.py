import hashlib
import os

import pytest

from tests.conftest import write_dataset
from tests.system.faults.corpora import content
from trainer.copying import copy_files, dataset_files, is_whole, seconds_per_sample
from trainer.dataset import read_manifest
from trainer.errors import BadConfig

SAMPLES = [[5 + number % 90] * (1 + number % 40) for number in range(2000)]


@pytest.fixture
def source(tmp_path):
    return write_dataset(tmp_path / "source", SAMPLES, shards=3, validation=[[7, 8]])


@pytest.fixture
def target(tmp_path):
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def copy(source, target, change=lambda: None):
    """Copy, and change the source once all is listed and the first bytes are copied."""
    manifest = read_manifest(source)
    files = dataset_files(source, manifest)
    change()
    return copy_files(files, source, target, manifest, lambda done, total, note: None)


def test_all_files_of_both_splits_and_the_notes_beside_them_are_copied(source, target):
    (source / "rejects.jsonl").write_text("{}\n")
    (source / "prepared.json").write_text("{}\n")
    (source / "of-somebody-else").write_text("no part of the dataset")
    figures = copy(source, target)
    (source / "of-somebody-else").unlink()
    assert content(target) == content(source)
    assert figures.size_bytes == sum(len(file) for file in content(source).values())
    assert min(figures.read_bytes_per_s, figures.write_bytes_per_s, figures.bytes_per_s) > 0


def test_progress_counts_every_byte(source, target):
    told = []
    manifest = read_manifest(source)
    files = dataset_files(source, manifest)
    figures = copy_files(files, source, target, manifest, lambda done, total, note: told.append((done, total, note)))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][:2] == (figures.size_bytes, figures.size_bytes)
    assert told[-1][2].endswith(" MiB/s")


@pytest.mark.parametrize("name", ["train-tokens-00002.npy", "validation-offsets-00000.npy", "tokenizer.json"])
def test_a_file_that_is_not_what_the_manifest_says_is_named(source, target, name):
    raw = bytearray((source / name).read_bytes())
    raw[-1] ^= 1
    (source / name).write_bytes(raw)
    with pytest.raises(BadConfig, match=rf"source/{name}: its SHA-256 is") as caught:
        copy(source, target)
    assert caught.value.next_step.endswith(f"autotune data verify {source}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.write_text(path.read_text() + "{}\n"), "became longer"),
        (lambda path: path.write_text(""), "became shorter"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_a_source_that_changes_while_it_is_copied_is_noticed(source, target, change, said):
    rejects = source / "rejects.jsonl"
    rejects.write_text("{}\n" * 20)
    with pytest.raises(BadConfig, match=rf"source/rejects\.jsonl: {said}"):
        copy(source, target, lambda: change(rejects))


def test_a_manifest_that_changes_while_it_is_copied_is_noticed(source, target):
    path = source / "manifest.json"
    other = path.read_text().replace('"rejected": 0', '"rejected": 1')
    with pytest.raises(BadConfig, match=r"source/manifest\.json: changed while it was copied"):
        copy(source, target, lambda: path.write_text(other))


def test_what_is_not_a_file_is_not_read(source, target, tmp_path):
    offsets = source / "train-offsets-00000.npy"
    offsets.rename(tmp_path / "outside.npy")
    with pytest.raises(BadConfig, match=r"train-offsets-00000\.npy: No such file"):
        copy(source, target)
    offsets.symlink_to(tmp_path / "outside.npy")
    with pytest.raises(BadConfig, match="is not a regular file"):
        copy(source, target)
    offsets.unlink()
    os.mkfifo(offsets)
    with pytest.raises(BadConfig, match="is not a regular file"):
        copy(source, target)
    assert list(target.iterdir()) == []


def test_a_file_that_becomes_a_link_after_it_was_listed_is_not_followed(source, target, tmp_path):
    tokenizer = source / "tokenizer.json"

    def swap():
        tokenizer.rename(tmp_path / "outside.json")
        tokenizer.symlink_to(tmp_path / "outside.json")

    with pytest.raises(BadConfig, match=r"tokenizer\.json: Too many levels of symbolic links"):
        copy(source, target, swap)
    assert not (target / "tokenizer.json").exists()


def test_a_copy_is_whole_only_with_every_file_of_its_size(source, target):
    manifest = read_manifest(source)
    assert not is_whole(target, manifest)
    copy(source, target)
    assert is_whole(target, manifest)
    for name, damaged in content(source).items():
        if name == "manifest.json":
            continue
        (target / name).write_bytes(damaged[:-1])
        assert not is_whole(target, manifest), name
        (target / name).write_bytes(damaged)
    assert is_whole(target, manifest)


def test_the_copy_of_another_dataset_is_not_taken_for_this_one(source, target, tmp_path):
    copy(source, target)
    other = write_dataset(tmp_path / "other", [[6] * 10] * 2000, shards=3)
    assert not is_whole(target, read_manifest(other))


def test_the_time_of_a_sample_is_measured_without_changing_anything(source):
    before = {name: hashlib.sha256(raw).digest() for name, raw in content(source).items()}
    seconds = seconds_per_sample(source)
    assert seconds is not None
    assert seconds > 0
    assert {name: hashlib.sha256(raw).digest() for name, raw in content(source).items()} == before


def test_a_dataset_without_training_samples_has_no_time_of_a_sample(tmp_path):
    assert seconds_per_sample(write_dataset(tmp_path / "empty", [], shards=0, validation=[[7]])) is None
