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
from trainer.formats.errors import UnreadableFile
from trainer.formats.progress import progress

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
    """Yield the manifest of a dataset, and write it back when it was changed."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    yield manifest
    path.write_text(json.dumps(manifest))


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "data")


def faults(directory):
    return [(fault.file, fault.what) for fault in verify(directory, progress).faults]


def test_intact_dataset_has_no_fault(good):
    verification = verify(good, progress)
    assert (verification.faults, verification.files) == ((), 10)
    headers = 8 * 128
    assert (
        verification.bytes_read
        == sum(path.stat().st_size for path in good.glob("*.npy")) - headers
    )


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_flipped_bit_is_found(good, tmp_path_factory, data):
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


def test_finds_every_fault(copy, tmp_path):
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
    fault_list = dict(faults(copy))
    other_files = {
        "tokenizer.json",
        "stray",
        "validation-tokens-00000.npy",
        "train-offsets-00000.npy",
    }
    assert fault_list.keys() == {*corrupt, *other_files}
    assert "cannot read" in fault_list["train-offsets-00000.npy"]
    fault_list = faults(copy)
    assert (
        "train-tokens-00001.npy",
        "id 65535 at position 36 is not below 500",
    ) in fault_list


@pytest.mark.parametrize(
    ("kind", "position", "value", "fault"),
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
def test_impossible_numbers_are_found(copy, kind, position, value, fault):
    name = f"train-{kind}-00000.npy"
    numbers = np.load(copy / name)
    numbers[position] = value
    np.save(copy / name, numbers)
    with changed(copy) as manifest:
        manifest["train"]["shards"][0][f"{kind}_sha256"] = hashlib.sha256(
            (copy / name).read_bytes()
        ).hexdigest()
    where = "manifest.json" if fault and "histogram" in fault else name
    assert [(file, text[: len(fault or "")]) for file, text in faults(copy)] == (
        [(where, fault)] if fault else []
    )


@pytest.mark.parametrize("name", ["train-offsets-00000.npy", "tokenizer.json"])
def test_file_without_permission_is_no_fault(copy, deny_reading, name):
    deny_reading(name)
    with pytest.raises(UnreadableFile, match=name):
        faults(copy)


def test_inspects_lengths_of_a_dataset(tmp_path):
    lengths = [30] * 60 + [126] * 30 + [500] * 10
    inspection = inspect(
        write_dataset(tmp_path / "data", [[5] * length for length in lengths]),
        [64, 128],
    )
    assert inspection.sampled == 100
    assert (
        inspection.percentiles[50],
        inspection.percentiles[99],
        inspection.longest_tokens,
    ) == (
        30,
        500,
        500,
    )
    assert inspection.mean_tokens == pytest.approx(np.mean(lengths))
    narrow, wide = inspection.rows
    assert narrow.cut_samples == pytest.approx(0.4)
    assert wide.cut_samples == pytest.approx(0.1)
    # 60 of 32 tokens make 30 sequences of 64; the other 40 fill a sequence each.
    assert narrow.packed_efficiency == 1.0
    assert narrow.padded_waste == pytest.approx(1 - (60 * 32 + 40 * 64) / 6400)
    assert narrow.packing_gain == pytest.approx(100 / 70)
    assert wide.cut_tokens == pytest.approx(10 * (502 - 128) / sum(lengths))


def test_empty_split_has_no_figures(tmp_path):
    empty = inspect(
        write_dataset(tmp_path / "empty", [], shards=0, validation=[[5, 6]])
    )
    assert (empty.sampled, empty.rows, empty.percentiles) == (0, (), {})
