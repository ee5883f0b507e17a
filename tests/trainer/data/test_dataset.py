import errno
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.datasets import write_dataset
from trainer.data import dataset as dataset_module
from trainer.data.dataset import TokenDataset
from trainer.data.manifest import LengthHistogram, Shard, Split, read_manifest
from trainer.errors import BadConfig, UnreadableFile

SAMPLES = [[5, 6, 7], [], [8], [9, 10, 11, 12]]

STORED_SAMPLES = st.lists(
    st.lists(st.integers(0, 499), max_size=20), min_size=1, max_size=12
)
many_datasets = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=40,
    deadline=None,
)


@many_datasets
@given(samples=STORED_SAMPLES, shards=st.integers(1, 3), limit=st.integers(0, 25))
def test_reads_single_samples_back(tmp_path_factory, samples, shards, limit):
    directory = write_dataset(
        tmp_path_factory.mktemp("d") / "data", samples, shards=min(shards, len(samples))
    )
    dataset = TokenDataset.open(directory)
    assert len(dataset) == len(samples)
    read = [dataset.read(number, limit).tolist() for number in range(len(samples))]
    assert read == [sample[:limit] for sample in samples]
    dataset.close()


@many_datasets
@given(samples=STORED_SAMPLES, shards=st.integers(1, 3), data=st.data())
def test_reads_many_samples_at_once(tmp_path_factory, samples, shards, data):
    directory = write_dataset(
        tmp_path_factory.mktemp("d") / "data", samples, shards=min(shards, len(samples))
    )
    dataset = TokenDataset.open(directory)
    numbers = data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=9))
    shard_of, begins, tokens = dataset.locate(np.array(numbers, dtype=np.int64))
    assert tokens.tolist() == [len(samples[number]) for number in numbers]

    ids = np.full(30 * len(numbers), 999, dtype=np.uint16)
    targets = 30 * np.arange(len(numbers)) + 5
    dataset.read_into(ids, targets, shard_of, begins, tokens)
    expected = np.full_like(ids, 999)
    for target, number in zip(targets, numbers, strict=True):
        expected[target : target + len(samples[number])] = samples[number]
    assert ids.tolist() == expected.tolist()
    dataset.close()


def test_prefetches_offsets_only_while_reads_wait(make_dataset, monkeypatch):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    read_cached = dataset_module._read_cached
    prefetched = []

    def count_prefetches():
        def all_samples():
            prefetched.append(True)
            return np.arange(4)

        dataset.prefetch_offsets(all_samples)
        return len(prefetched)

    def read_as_if_cached(view, reads):
        read_cached(view, reads)
        return []

    assert count_prefetches() == 1  # nothing is known yet
    monkeypatch.setattr(dataset_module, "_read_cached", read_as_if_cached)
    dataset.locate(np.arange(4))
    assert count_prefetches() == 1
    # As if no read were cached.
    monkeypatch.setattr(dataset_module, "_read_cached", lambda view, reads: reads)
    _, _, tokens = dataset.locate(np.arange(4))
    assert tokens.tolist() == [3, 0, 1, 4]
    assert count_prefetches() == 2


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    limit=st.integers(6, 3000),
)
def test_estimates_tokens_beyond_a_limit(lengths, limit):
    edges = [*range(0, 1024, 8), 1024, 2048, 4096]
    bins = np.searchsorted(edges, lengths, side="right") - 1
    histogram = LengthHistogram(
        edges=edges, counts=np.bincount(bins, minlength=len(edges)).tolist()
    )
    shard = Shard(
        tokens_file="t",
        offsets_file="o",
        samples=len(lengths),
        tokens=sum(lengths),
        tokens_sha256="0" * 64,
        offsets_sha256="0" * 64,
    )
    split = Split(shards=[shard], length_histogram=histogram)
    share = split.cut_tokens_share(limit)
    lost_share = sum(max(0, length - limit) for length in lengths) / sum(lengths)
    assert 0 <= share <= 1
    if limit >= max(lengths) + 8 and max(lengths) < 1024:
        assert share == 0
    if min(lengths) > limit + 2048:
        assert share == pytest.approx(lost_share)
    if limit % 8 == 0 and max(lengths) < 1024:
        # Each sample is known to half a bin.
        assert abs(share - lost_share) <= 4 * len(lengths) / sum(lengths)


def test_unknown_lengths_are_not_cut(make_dataset):
    manifest = read_manifest(make_dataset(SAMPLES))
    histogram = LengthHistogram(edges=[0], counts=[len(SAMPLES)])
    split = manifest.train.model_copy(update={"length_histogram": histogram})
    assert split.cut_tokens_share(8) is None
    assert Split(shards=[], length_histogram=histogram).cut_tokens_share(8) is None


def test_splits_are_separate(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES, validation=[[40, 41]])
    assert len(TokenDataset.open(directory)) == 4
    validation = TokenDataset.open(directory, "validation")
    assert [validation.read(i).tolist() for i in range(len(validation))] == [[40, 41]]


def test_validation_split_may_be_empty(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES)
    assert len(TokenDataset.open(directory, "validation")) == 0


def test_dataset_can_be_pickled(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES, validation=[[40, 41]])
    validation = TokenDataset.open(directory, "validation")
    assert pickle.loads(pickle.dumps(validation)).read(0).tolist() == [40, 41]


@pytest.mark.parametrize("kinds", [["tokens"], ["tokens", "offsets"]])
def test_shard_that_shrinks_in_use_is_an_error(make_dataset, kinds):
    directory = make_dataset(SAMPLES)
    dataset = TokenDataset.open(directory)
    for kind in kinds:
        path = directory / f"train-{kind}-00000.npy"
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(BadConfig, match="became shorter"):
            dataset.read(3)


@pytest.mark.parametrize("sample", [-1, 4])
def test_unknown_sample_is_an_index_error(make_dataset, sample):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    with pytest.raises(IndexError):
        dataset.read(sample, 10)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _store_objects(path):
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _store_other_numbers(path):
    np.save(path, np.arange(3, dtype=np.uint16))


def _lead_outside(path):
    path.symlink_to(path.rename(path.parent.parent / "outside.npy"))


@pytest.mark.parametrize(
    "damage", [_truncate, _store_objects, _store_other_numbers, _lead_outside]
)
def test_rejects_shard_that_does_not_match_manifest(make_dataset, damage):
    path = make_dataset(SAMPLES) / "train-tokens-00000.npy"
    damage(path)
    with pytest.raises(BadConfig, match=r"train-tokens-00000\.npy"):
        TokenDataset.open(path.parent)


@pytest.mark.parametrize("name", ["train-tokens-00000.npy", "manifest.json"])
def test_file_without_permission_is_not_corrupt(make_dataset, deny_reading, name):
    directory = make_dataset(SAMPLES)
    deny_reading(name)
    with pytest.raises(UnreadableFile, match="Permission denied") as raised:
        TokenDataset.open(directory)
    assert str(directory / name) in raised.value.message
    assert f"namei -l {directory / name}" in raised.value.next_step
    assert "corrupt" not in raised.value.next_step


def test_directory_without_permission_is_no_traceback(make_dataset, monkeypatch):
    def is_file(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    directory = make_dataset(SAMPLES)
    monkeypatch.setattr(Path, "is_file", is_file)
    with pytest.raises(UnreadableFile, match="Permission denied"):
        read_manifest(directory)


def test_too_many_open_files_are_not_a_corrupt_dataset(make_dataset, deny_reading):
    directory = make_dataset(SAMPLES)
    deny_reading("train-tokens-00000.npy", errno.EMFILE)
    with pytest.raises(UnreadableFile) as raised:
        TokenDataset.open(directory)
    assert "ulimit -n" in raised.value.next_step


def rejects_manifest(directory, change, message):
    """Check that a dataset's manifest is rejected once it is changed."""
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

    rejects_manifest(make_dataset(SAMPLES), change, "tokens_file")


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

    rejects_manifest(make_dataset(SAMPLES), change, "used_vocab_size")


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        ({"counts": [1]}, "4 edges do not match 1 counts"),
        ({"edges": [0, 64, 32, 128]}, "edges must be ascending"),
    ],
)
def test_rejects_impossible_histogram(make_dataset, bins, message):
    def change(manifest):
        manifest["train"]["length_histogram"].update(bins)

    rejects_manifest(make_dataset(SAMPLES), change, message)


def test_rejects_older_schema(make_dataset):
    def change(manifest):
        manifest["schema_version"] = 1

    rejects_manifest(make_dataset(SAMPLES), change, "schema version 1")


def test_rejects_offsets_beyond_the_shard(make_dataset):
    directory = make_dataset(SAMPLES)
    np.save(
        directory / "train-offsets-00000.npy",
        np.array([0, 3, 3, 4, 2**40], dtype=np.uint64),
    )
    with pytest.raises(BadConfig, match="exceed the shard"):
        TokenDataset.open(directory).read(3, 10)


@pytest.mark.parametrize(
    ("name", "message", "next_step"),
    [
        (".", "is not a dataset", "autotune data prepare"),
        (
            "corpus.txt",
            "is a raw file",
            "autotune data prepare text:{directory}/corpus.txt --out",
        ),
        ("protein", "dataset not found", "Did you mean {directory}/proteins?"),
        ("logs", "dataset not found", "autotune data prepare"),
    ],
)
def test_path_without_a_dataset_gets_a_remedy(tmp_path, name, message, next_step):
    write_dataset(tmp_path / "proteins", SAMPLES)
    (tmp_path / "corpus.txt").write_text("a line\n")
    with pytest.raises(BadConfig, match=message) as raised:
        read_manifest(tmp_path / name)
    assert next_step.format(directory=tmp_path) in raised.value.next_step
