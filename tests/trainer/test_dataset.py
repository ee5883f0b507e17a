import json
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import write_dataset
from trainer import dataset as reading
from trainer.dataset import TokenDataset, read_manifest
from trainer.errors import BadConfig

SAMPLES = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(0, 499), max_size=20), min_size=1, max_size=12),
    shards=st.integers(1, 3),
    limit=st.integers(0, 25),
)
def test_what_was_written_is_read_back_whatever_the_shards(tmp_path_factory, samples, shards, limit):
    directory = write_dataset(tmp_path_factory.mktemp("d") / "data", samples, shards=min(shards, len(samples)))
    dataset = TokenDataset.open(directory)
    assert len(dataset) == len(samples)
    assert [dataset.read(i, limit).tolist() for i in range(len(samples))] == [sample[:limit] for sample in samples]
    dataset.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(0, 499), max_size=20), min_size=1, max_size=12),
    shards=st.integers(1, 3),
    data=st.data(),
)
def test_many_samples_are_read_at_once_into_any_places(tmp_path_factory, samples, shards, data):
    directory = write_dataset(tmp_path_factory.mktemp("d") / "data", samples, shards=min(shards, len(samples)))
    dataset = TokenDataset.open(directory)
    chosen = np.array(data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=9)), dtype=np.int64)
    shard, begins, tokens = dataset.locate(chosen)
    assert tokens.tolist() == [len(samples[i]) for i in chosen]
    ids = np.full(30 * len(chosen), 999, dtype=np.uint16)
    places = 30 * np.arange(len(chosen)) + 5
    dataset.read_into(ids, places, shard, begins, tokens)
    expected = np.full_like(ids, 999)
    for place, i in zip(places, chosen, strict=True):
        expected[place : place + len(samples[i])] = samples[i]
    assert ids.tolist() == expected.tolist()
    dataset.close()


def test_what_comes_is_announced_only_while_reads_have_to_wait(make_dataset, monkeypatch):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    cached = reading._read_cached
    asked = []

    def announce():
        dataset.announce(lambda: asked.append(1) or np.arange(4))
        return len(asked)

    assert announce() == 1  # nothing is known yet
    monkeypatch.setattr(reading, "_read_cached", lambda view, reads: cached(view, reads) and [])
    dataset.locate(np.arange(4))
    assert announce() == 1
    monkeypatch.setattr(reading, "_read_cached", lambda view, reads: range(len(reads)))
    assert dataset.locate(np.arange(4))[2].tolist() == [3, 0, 1, 4]
    assert announce() == 2


def test_the_splits_are_read_apart(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES, validation=[[40, 41]])
    assert len(TokenDataset.open(directory)) == 4
    validation = TokenDataset.open(directory, "validation")
    assert [validation.read(i).tolist() for i in range(len(validation))] == [[40, 41]]
    assert pickle.loads(pickle.dumps(validation)).read(0).tolist() == [40, 41]


def test_a_split_without_samples_is_empty(make_dataset):
    assert len(TokenDataset.open(make_dataset(SAMPLES), "validation")) == 0


def test_a_shard_that_shrinks_while_in_use_is_an_error(make_dataset):
    directory = make_dataset(SAMPLES)
    dataset = TokenDataset.open(directory)
    for kind in ("tokens", "offsets"):
        path = directory / f"train-{kind}-00000.npy"
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(BadConfig, match="became shorter"):
            dataset.read(3)


@pytest.mark.parametrize("change", [{"used_vocab_size": 600}, {"used_vocab_size": 4}])
def test_a_vocabulary_that_does_not_hold_its_ids_is_refused(make_dataset, change):
    path = make_dataset(SAMPLES) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadConfig):
        read_manifest(path.parent)


def test_a_pickled_dataset_opens_its_files_again(make_dataset):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    assert pickle.loads(pickle.dumps(dataset)).read(3, 9).tolist() == SAMPLES[3]


def test_a_sample_that_does_not_exist_is_an_index_error(make_dataset):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    for sample in (-1, 4):
        with pytest.raises(IndexError):
            dataset.read(sample, 10)


def test_a_directory_that_is_no_dataset_says_how_to_make_one(tmp_path):
    with pytest.raises(BadConfig) as caught:
        read_manifest(tmp_path)
    assert "autotune data prepare" in caught.value.next_step


def test_a_truncated_shard_is_refused(make_dataset):
    path = make_dataset(SAMPLES) / "train-tokens-00000.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadConfig, match=r"train-tokens-00000\.npy"):
        TokenDataset.open(path.parent)


def test_a_shard_of_objects_is_refused_unread(make_dataset):
    path = make_dataset(SAMPLES) / "train-tokens-00000.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(BadConfig):
        TokenDataset.open(path.parent)


def test_a_shard_that_is_a_link_out_of_the_directory_is_refused(make_dataset, tmp_path):
    path = make_dataset(SAMPLES) / "train-tokens-00000.npy"
    outside = tmp_path / "outside.npy"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(BadConfig):
        TokenDataset.open(path.parent)


@pytest.mark.parametrize("name", ["../x.npy", "/etc/passwd", "a/b.npy", ".."])
def test_a_file_name_that_leaves_the_directory_is_refused(make_dataset, name):
    path = make_dataset(SAMPLES) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["train"]["shards"][0]["tokens_file"] = name
    path.write_text(json.dumps(manifest))
    with pytest.raises(BadConfig):
        read_manifest(path.parent)


def test_offsets_beyond_the_shard_are_refused(make_dataset):
    directory = make_dataset(SAMPLES)
    np.save(directory / "train-offsets-00000.npy", np.array([0, 3, 3, 4, 2**40], dtype=np.uint64))
    with pytest.raises(BadConfig, match="outside the shard"):
        TokenDataset.open(directory).read(3, 10)


def test_another_schema_version_is_refused(make_dataset):
    path = make_dataset(SAMPLES) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 1}))
    with pytest.raises(BadConfig, match="schema version 1"):
        read_manifest(path.parent)


def test_raw_data_is_to_be_prepared_first(tmp_path):
    (tmp_path / "corpus.txt").write_text("a line\n")
    with pytest.raises(BadConfig, match="is a file") as refused:
        read_manifest(tmp_path / "corpus.txt")
    assert f"autotune data prepare text:{tmp_path / 'corpus.txt'} --out" in refused.value.next_step


def test_a_dataset_whose_name_is_mistyped_is_asked_for(tmp_path):
    write_dataset(tmp_path / "proteins", SAMPLES)
    with pytest.raises(BadConfig, match="is not a directory") as refused:
        read_manifest(tmp_path / "protein")
    assert refused.value.next_step == f"Did you mean {tmp_path / 'proteins'}?"
    with pytest.raises(BadConfig, match="is not a directory") as refused:
        read_manifest(tmp_path / "logs")
    assert "autotune data prepare" in refused.value.next_step
