import json
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.datasets import write_dataset
from trainer.data import dataset as reading
from trainer.data.dataset import TokenDataset, read_manifest
from trainer.errors import BadConfig

SAMPLES = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=40,
    deadline=None,
)
@given(
    samples=st.lists(
        st.lists(st.integers(0, 499), max_size=20), min_size=1, max_size=12
    ),
    shards=st.integers(1, 3),
    limit=st.integers(0, 25),
    data=st.data(),
)
def test_what_was_written_is_read_back_one_by_one_and_many_at_once(
    tmp_path_factory, samples, shards, limit, data
):
    directory = write_dataset(
        tmp_path_factory.mktemp("d") / "data", samples, shards=min(shards, len(samples))
    )
    dataset = TokenDataset.open(directory)
    assert len(dataset) == len(samples)
    assert [dataset.read(i, limit).tolist() for i in range(len(samples))] == [
        sample[:limit] for sample in samples
    ]
    chosen = np.array(
        data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=9)),
        dtype=np.int64,
    )
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


def test_what_comes_is_announced_only_while_reads_have_to_wait(
    make_dataset, monkeypatch
):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    cached = reading._read_cached
    asked = []

    def announce():
        dataset.announce(lambda: asked.append(1) or np.arange(4))
        return len(asked)

    assert announce() == 1  # nothing is known yet
    monkeypatch.setattr(
        reading, "_read_cached", lambda view, reads: cached(view, reads) and []
    )
    dataset.locate(np.arange(4))
    assert announce() == 1
    monkeypatch.setattr(reading, "_read_cached", lambda view, reads: reads)
    assert dataset.locate(np.arange(4))[2].tolist() == [3, 0, 1, 4]
    assert announce() == 2


def test_the_splits_are_read_apart(tmp_path):
    directory = write_dataset(tmp_path / "data", SAMPLES, validation=[[40, 41]])
    assert len(TokenDataset.open(directory)) == 4
    assert (
        len(TokenDataset.open(write_dataset(tmp_path / "other", SAMPLES), "validation"))
        == 0
    )
    validation = TokenDataset.open(directory, "validation")
    assert [validation.read(i).tolist() for i in range(len(validation))] == [[40, 41]]
    assert pickle.loads(pickle.dumps(validation)).read(0).tolist() == [40, 41]


def test_a_shard_that_shrinks_while_in_use_is_an_error(make_dataset):
    directory = make_dataset(SAMPLES)
    dataset = TokenDataset.open(directory)
    for kind in ("tokens", "offsets"):
        path = directory / f"train-{kind}-00000.npy"
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(BadConfig, match="became shorter"):
            dataset.read(3)


def test_a_sample_that_does_not_exist_is_an_index_error(make_dataset):
    dataset = TokenDataset.open(make_dataset(SAMPLES))
    for sample in (-1, 4):
        with pytest.raises(IndexError):
            dataset.read(sample, 10)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: np.save(
            path, np.array([{"a": 1}], dtype=object), allow_pickle=True
        ),
        lambda path: np.save(path, np.arange(3, dtype=np.uint16)),
        lambda path: path.symlink_to(path.rename(path.parent.parent / "outside.npy")),
    ],
    ids=["cut", "objects", "other numbers", "led away"],
)
def test_a_shard_that_is_not_what_the_manifest_says_is_refused_unread(
    make_dataset, damage
):
    path = make_dataset(SAMPLES) / "train-tokens-00000.npy"
    damage(path)
    with pytest.raises(BadConfig, match=r"train-tokens-00000\.npy"):
        TokenDataset.open(path.parent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(
            (
                lambda table, name=name: table["train"]["shards"][0].update(
                    tokens_file=name
                ),
                "tokens_file",
            )
            for name in ("../x.npy", "/etc/passwd", "a/b.npy", "..")
        ),
        *(
            (
                lambda table, size=size: table.update(used_vocab_size=size),
                "used_vocab_size",
            )
            for size in (600, 4)
        ),
        (
            lambda table: table["train"]["length_histogram"].update(counts=[1]),
            "4 edges do not match 1 counts",
        ),
        (
            lambda table: table["train"]["length_histogram"].update(
                edges=[0, 64, 32, 128]
            ),
            "edges must be ascending",
        ),
        (lambda table: table.update(schema_version=1), "schema version 1"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(make_dataset, change, said):
    path = make_dataset(SAMPLES) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(BadConfig, match=said):
        read_manifest(path.parent)


def test_offsets_beyond_the_shard_are_refused(make_dataset):
    directory = make_dataset(SAMPLES)
    np.save(
        directory / "train-offsets-00000.npy",
        np.array([0, 3, 3, 4, 2**40], dtype=np.uint64),
    )
    with pytest.raises(BadConfig, match="exceed the shard"):
        TokenDataset.open(directory).read(3, 10)


@pytest.mark.parametrize(
    ("name", "said", "next_step"),
    [
        (".", "is not a dataset", "autotune data prepare"),
        (
            "corpus.txt",
            "is a raw file",
            "autotune data prepare text:{place}/corpus.txt --out",
        ),
        ("protein", "dataset not found", "Did you mean {place}/proteins?"),
        ("logs", "dataset not found", "autotune data prepare"),
    ],
)
def test_what_is_no_dataset_is_to_be_prepared_first_or_was_mistyped(
    tmp_path, name, said, next_step
):
    write_dataset(tmp_path / "proteins", SAMPLES)
    (tmp_path / "corpus.txt").write_text("a line\n")
    with pytest.raises(BadConfig, match=said) as refused:
        read_manifest(tmp_path / name)
    assert next_step.format(place=tmp_path) in refused.value.next_step
