"""Datasets on disk: reading samples, and errors of missing or corrupt files."""

import errno
import pickle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.datasets import write_dataset
from tests.trainer.data.descriptors import open_descriptors
from trainer.data import dataset as dataset_module
from trainer.data.dataset import TokenDataset
from trainer.formats.errors import BadConfig, UnreadableFile

SAMPLES = [[5, 6, 7], [], [8], [9, 10, 11, 12]]
ALL_SAMPLES = np.arange(len(SAMPLES))
"""Indices of all samples."""

STORED_SAMPLES = st.lists(
    st.lists(st.integers(0, 499), max_size=20), min_size=1, max_size=12
)
SHARDS = st.integers(1, 3)
with_real_files = settings(
    # ``tmp_path_factory`` gives each example its own directory.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=40,
    deadline=None,
)


def open_written(tmp_path_factory, samples, shards):
    """Write samples to a dataset of several shards, and open it."""
    directory = tmp_path_factory.mktemp("d") / "data"
    # No shard is empty.
    write_dataset(directory, samples, shards=min(shards, len(samples)))
    return TokenDataset.open(directory)


@with_real_files
@given(samples=STORED_SAMPLES, shards=SHARDS, limit_tokens=st.integers(0, 25))
def test_reads_single_samples_back(tmp_path_factory, samples, shards, limit_tokens):
    dataset = open_written(tmp_path_factory, samples, shards)
    assert len(dataset) == len(samples)
    for number, sample in enumerate(samples):
        read_ids = dataset.read(number, limit_tokens).tolist()
        assert read_ids == sample[:limit_tokens]
    dataset.close()


@with_real_files
@given(samples=STORED_SAMPLES, shards=SHARDS, data=st.data())
def test_reads_many_samples_at_once(tmp_path_factory, samples, shards, data):
    dataset = open_written(tmp_path_factory, samples, shards)
    numbers = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=9))
    shard_of, begins, tokens = dataset.locate(np.array(numbers, dtype=np.int64))
    assert tokens.tolist() == [len(samples[number]) for number in numbers]

    # Each sample, of at most 20 ids, gets 30 positions and begins at the sixth, so that
    # ids written before or after it would be seen.
    positions_per_sample = 30
    untouched = 999
    ids = np.full(positions_per_sample * len(numbers), untouched, dtype=np.uint16)
    targets = positions_per_sample * np.arange(len(numbers)) + 5
    dataset.read_into(ids, targets, shard_of, begins, tokens)
    expected = np.full_like(ids, untouched)
    for target, number in zip(targets, numbers, strict=True):
        expected[target : target + len(samples[number])] = samples[number]
    assert ids.tolist() == expected.tolist()
    dataset.close()


def prefetches(dataset):
    """Return whether a dataset prefetches offsets."""
    # A dataset calls this function only if it prefetches.
    next_samples = Mock(return_value=ALL_SAMPLES)
    dataset.prefetch_offsets(next_samples)
    return next_samples.called


# Whether a file is in the page cache depends on the machine, so the private function
# that reads cached bytes is replaced.


def locate_all_cached(dataset, monkeypatch):
    """Locate all samples as if their offsets were in the page cache."""
    read_cached = dataset_module._read_cached

    def read_all(view, reads):
        read_cached(view, reads)
        return []  # no read has to wait for the disk

    with monkeypatch.context() as patch:
        patch.setattr(dataset_module, "_read_cached", read_all)
        return dataset.locate(ALL_SAMPLES)


def locate_all_on_disk(dataset, monkeypatch):
    """Locate all samples as if none of their offsets were in the page cache."""
    with monkeypatch.context() as patch:
        patch.setattr(dataset_module, "_read_cached", lambda view, reads: reads)
        return dataset.locate(ALL_SAMPLES)


def test_prefetches_offsets_before_the_first_read(make_dataset):
    assert prefetches(TokenDataset.open(make_dataset(SAMPLES)))


def test_prefetches_nothing_after_reads_from_page_cache(make_dataset, monkeypatch):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    locate_all_cached(dataset, monkeypatch)
    assert not prefetches(dataset)


def test_prefetches_offsets_again_after_reads_from_disk(make_dataset, monkeypatch):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    locate_all_cached(dataset, monkeypatch)
    locate_all_on_disk(dataset, monkeypatch)
    assert prefetches(dataset)


def test_reads_from_disk_if_not_cached(make_dataset, monkeypatch):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    _, _, tokens = locate_all_on_disk(dataset, monkeypatch)
    assert tokens.tolist() == [len(sample) for sample in SAMPLES]


def test_splits_are_separate(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES, validation=[[40, 41]])
    assert len(TokenDataset.open(directory)) == len(SAMPLES)
    validation = TokenDataset.open(directory, "validation")
    assert len(validation) == 1
    assert validation.read(0).tolist() == [40, 41]


def test_validation_split_may_be_empty(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES)
    assert len(TokenDataset.open(directory, "validation")) == 0


def test_dataset_can_be_pickled(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES, validation=[[40, 41]])
    validation = TokenDataset.open(directory, "validation")
    assert pickle.loads(pickle.dumps(validation)).read(0).tolist() == [40, 41]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("kind", ["tokens", "offsets"])
def test_shard_that_shrinks_in_use_is_an_error(make_dataset, kind):
    directory = make_dataset(SAMPLES)
    dataset = TokenDataset.open(directory)
    path = directory / f"train-{kind}-00000.npy"
    truncate(path)
    last_sample = len(SAMPLES) - 1
    with pytest.raises(BadConfig, match=rf"{path.name}: became shorter"):
        dataset.read(last_sample)


@pytest.mark.parametrize("sample", [-1, len(SAMPLES)])
def test_unknown_sample_is_an_index_error(make_dataset, sample):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    with pytest.raises(IndexError):
        dataset.read(sample, 10)


def store_objects(path):
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def store_other_numbers(path):
    np.save(path, np.arange(3, dtype=np.uint16))


def link_outside(path):
    path.symlink_to(path.rename(path.parent.parent / "outside.npy"))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(truncate, id="too short"),
        pytest.param(store_objects, id="objects"),
        pytest.param(store_other_numbers, id="too few numbers"),
        pytest.param(link_outside, id="link"),
        pytest.param(Path.unlink, id="missing"),
    ],
)
def test_rejects_shard_that_does_not_match_manifest(make_dataset, damage):
    path = make_dataset(SAMPLES) / "train-tokens-00000.npy"
    damage(path)
    with pytest.raises(BadConfig, match=r"train-tokens-00000\.npy"):
        TokenDataset.open(path.parent)


def test_closes_files_if_a_later_one_is_rejected(make_dataset):
    directory = make_dataset(SAMPLES, shards=2)
    before = open_descriptors()
    truncate(directory / "train-offsets-00001.npy")
    with pytest.raises(BadConfig, match="train-offsets-00001"):
        TokenDataset.open(directory)
    assert open_descriptors() == before


@pytest.mark.parametrize("name", ["train-tokens-00000.npy", "manifest.json"])
def test_file_without_permission_is_not_corrupt(make_dataset, deny_reading, name):
    directory = make_dataset(SAMPLES)
    deny_reading(name)
    with pytest.raises(UnreadableFile, match="Permission denied") as raised:
        TokenDataset.open(directory)
    assert str(directory / name) in raised.value.message
    assert f"namei -l {directory / name}" in raised.value.next_step
    assert "corrupt" not in raised.value.next_step


def test_too_many_open_files_get_a_remedy(make_dataset, deny_reading):
    directory = make_dataset(SAMPLES)
    deny_reading("train-tokens-00000.npy", errno.EMFILE)
    with pytest.raises(UnreadableFile) as raised:
        TokenDataset.open(directory)
    assert "ulimit -n" in raised.value.next_step


def test_rejects_offsets_beyond_the_shard(make_dataset):
    directory = make_dataset(SAMPLES)
    path = directory / "train-offsets-00000.npy"
    offsets = np.load(path)
    offsets[-1] = 2**40
    np.save(path, offsets)
    last_sample = len(SAMPLES) - 1
    with pytest.raises(BadConfig, match="exceed the shard"):
        TokenDataset.open(directory).read(last_sample, 10)
