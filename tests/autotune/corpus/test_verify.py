import hashlib
import json
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.corpus.verify import inspect, verify
from testbed.datasets import write_dataset
from trainer.record.progress import progress

SAMPLES = [[5, 6, 7], [8], [9, 10, 11, 12], [1, 300], list(range(5, 105))]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify") / "data"
    write_dataset(directory, SAMPLES * 20, shards=3, validation=[[20, 21], [22]])
    with changed(directory) as manifest:
        shards = manifest["train"]["shards"] + manifest["validation"]["shards"]
        manifest["source"]["token_bytes"] = 2 * sum(shard["tokens"] for shard in shards)
    return directory


@contextmanager
def changed(directory):
    """A manifest, to be changed in place."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    yield manifest
    path.write_text(json.dumps(manifest))


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "data")


def faults(directory):
    return [(fault.file, fault.what) for fault in verify(directory, progress).faults]


def test_a_whole_dataset_has_no_fault_and_was_read_once(good):
    found = verify(good, progress)
    assert (found.faults, found.files) == ((), 10)
    headers = 8 * 128
    assert (
        found.bytes_read
        == sum(path.stat().st_size for path in good.glob("*.npy")) - headers
    )


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_flipped_bit_is_found_and_its_file_is_named(good, tmp_path_factory, data):
    directory = shutil.copytree(good, tmp_path_factory.mktemp("flipped") / "data")
    names = sorted(
        path.name for path in directory.iterdir() if path.name != "manifest.json"
    )
    name = data.draw(st.sampled_from(names))
    content = bytearray((directory / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    (directory / name).write_bytes(content)
    assert name in {file for file, _ in faults(directory)}
    shutil.rmtree(directory.parent)


def test_all_faults_are_found_not_the_first(copy, tmp_path):
    corrupt = [f"train-tokens-{number:05}.npy" for number in range(3)]
    for name in corrupt:
        with (copy / name).open("r+b") as file:
            file.seek(200)
            file.write(b"\xff\xff")
    (copy / "tokenizer.json").write_text("{}")
    (copy / "stray").write_text("")
    (copy / "rejects.jsonl").write_text("")  # is no fault
    (copy / "validation-tokens-00000.npy").unlink()
    # A file behind a link is not read.
    (copy / "train-offsets-00000.npy").rename(tmp_path / "outside.npy")
    (copy / "train-offsets-00000.npy").symlink_to(tmp_path / "outside.npy")
    found = dict(faults(copy))
    others = {
        "tokenizer.json",
        "stray",
        "validation-tokens-00000.npy",
        "train-offsets-00000.npy",
    }
    assert found.keys() == {*corrupt, *others}
    assert "cannot read" in found["train-offsets-00000.npy"]
    found = faults(copy)
    assert (
        "train-tokens-00001.npy",
        "id 65535 at position 36 is not below 500",
    ) in found


@pytest.mark.parametrize(
    ("kind", "place", "value", "what"),
    [
        ("tokens", 2, 499, None),
        ("tokens", 2, 500, "id 500 at position 2 is not below 500"),
        ("tokens", 2, 4, "id 4 at position 2 is a special token"),
        ("tokens", 2, 1, None),
        ("offsets", 0, 1, "the first offset is 1, expected 0"),
        ("offsets", 2, 1, "offset 2 is less than the one before it"),
        ("offsets", -1, 10**6, "the last offset is 1000000, expected"),
        ("offsets", 5, 60, "the length histogram of train"),
    ],
)
def test_numbers_that_cannot_be_are_found_even_where_the_hash_is_right(
    copy, kind, place, value, what
):
    name = f"train-{kind}-00000.npy"
    numbers = np.load(copy / name)
    numbers[place] = value
    np.save(copy / name, numbers)
    with changed(copy) as manifest:
        manifest["train"]["shards"][0][f"{kind}_sha256"] = hashlib.sha256(
            (copy / name).read_bytes()
        ).hexdigest()
    where = "manifest.json" if what and "histogram" in what else name
    assert [(file, said[: len(what or "")]) for file, said in faults(copy)] == (
        [(where, what)] if what else []
    )


def test_figures_are_those_of_the_lengths_and_an_empty_training_split_has_none(
    tmp_path,
):
    lengths = [30] * 60 + [126] * 30 + [500] * 10
    found = inspect(
        write_dataset(tmp_path / "data", [[5] * length for length in lengths]),
        [64, 128],
    )
    assert found.sampled == 100
    assert (found.percentiles[50], found.percentiles[99], found.longest_tokens) == (
        30,
        500,
        500,
    )
    assert found.mean_tokens == pytest.approx(np.mean(lengths))
    narrow, wide = found.rows
    assert narrow.cut_samples == pytest.approx(0.4)
    assert wide.cut_samples == pytest.approx(0.1)
    # 60 of 32 tokens make 30 rows of 64; the other 40 fill a row each.
    assert narrow.packed_efficiency == 1.0
    assert narrow.padded_waste == pytest.approx(1 - (60 * 32 + 40 * 64) / 6400)
    assert narrow.packing_gain == pytest.approx(100 / 70)
    assert wide.cut_tokens == pytest.approx(10 * (502 - 128) / sum(lengths))
    empty = inspect(
        write_dataset(tmp_path / "empty", [], shards=0, validation=[[5, 6]])
    )
    assert (empty.sampled, empty.rows, empty.percentiles) == (0, (), {})
