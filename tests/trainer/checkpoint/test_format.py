import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from testbed.examples.checkpoints import (
    CONTENT,
    failing_method,
    state_of,
    tensor_entries,
    write_checkpoint,
)
from trainer.checkpoint import format
from trainer.checkpoint.format import (
    BadCheckpoint,
    CheckpointManifest,
    checkpoint_name,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_checkpoint,
)
from trainer.config.tables import canonical_sha256
from trainer.errors import BadConfig, DiskTrouble

FIRST_SHARE = "rank-00000.safetensors"


def change_manifest(path, change):
    """Change a checkpoint's manifest, and its hash to match, as an attacker would.

    ``change`` is called with the table of the manifest, which it changes.
    """
    manifest_file = path / "manifest.json"
    table = json.loads(manifest_file.read_text())
    change(table)
    del table["content_sha256"]
    table["content_sha256"] = canonical_sha256(table)
    manifest_file.write_text(json.dumps(table))


def steps_in(root):
    return [format.step_of(path.name) for path in list_checkpoints(root)]


def hidden_files(root):
    return list(root.glob(".*"))


def test_written_checkpoint_is_read_back(tmp_path):
    changes = {"health": {"usual": True}, "noise_scale": [0.5, 1e-7]}
    path = write_checkpoint(tmp_path, 5, **changes)
    manifest = read_checkpoint(path)
    assert manifest.state == state_of(5, **changes)
    assert manifest.tensors == tensor_entries()
    assert manifest.written_utc.endswith("Z")
    (file,) = manifest.files
    assert (path / file.name).read_bytes() == CONTENT


def test_manifest_text_is_parsed_back(tmp_path):
    manifest = read_checkpoint(write_checkpoint(tmp_path, 5))
    table = json.loads(format.manifest_text(manifest))
    assert format.parse_manifest(table, "a manifest") == manifest


def test_checkpoints_after_a_rollback_are_newer(tmp_path):
    # Step and number of rollbacks; as text, 10 rollbacks would sort before 2, and a
    # step of 10 digits before one of 9.
    newest_first = [(5, 10), (5, 2), (10, 1), (1_000_000_000, 0), (20, 0), (5, 0)]
    names = [checkpoint_name(step, rollbacks) for step, rollbacks in newest_first]
    for name in sorted(names):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == names
    assert steps_in(tmp_path) == [step for step, _ in newest_first]


def test_other_entries_are_not_checkpoints(tmp_path):
    for name in (
        "step-5",  # names have nine digits
        "step-000000007.corrupt-1",
        ".step-000000009.attempt-1.partial",
        "other",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000030").symlink_to(tmp_path / "other")
    (tmp_path / "step-000000031").write_text("")
    assert list_checkpoints(tmp_path) == []


def test_missing_directory_has_no_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_prune_keeps_last_milestones_and_newest_good(tmp_path):
    for step in range(1, 10):
        write_checkpoint(tmp_path, step, good=step in (2, 5))
    removed = prune(tmp_path, keep_last=2, keep_every_steps=3)
    # The last are 9 and 8, milestones 9, 6 and 3, and the newest good one is 5.
    assert steps_in(tmp_path) == [9, 8, 6, 5, 3]
    assert sorted(removed) == [checkpoint_name(step, 0) for step in (1, 2, 4, 7)]
    assert not hidden_files(tmp_path)
    assert prune(tmp_path, keep_last=2, keep_every_steps=3) == []


def test_prune_does_not_take_a_corrupt_one_for_good(tmp_path):
    for step in (5, 7, 9):
        write_checkpoint(tmp_path, step, good=step < 9)
    (tmp_path / checkpoint_name(7, 0) / "manifest.json").write_text("{}")
    prune(tmp_path, keep_last=1, keep_every_steps=None)
    assert steps_in(tmp_path) == [9, 5]


CHECKPOINT_FILES = ["manifest.json", FIRST_SHARE]


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_truncated_file_is_named(tmp_path, name):
    path = write_checkpoint(tmp_path, 5)
    file = path / name
    content = file.read_bytes()
    for length in np.random.default_rng(0).integers(len(content), size=15):
        file.write_bytes(content[:length])
        with pytest.raises(BadCheckpoint, match=re.escape(str(file))):
            read_checkpoint(path)
    file.write_bytes(content)
    read_checkpoint(path)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_file_with_a_flipped_bit_is_named(tmp_path, name):
    path = write_checkpoint(tmp_path, 5)
    file = path / name
    content = file.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(15):
        changed = bytearray(content)
        changed[random.integers(len(content))] ^= 1 << int(random.integers(8))
        file.write_bytes(changed)
        with pytest.raises(BadCheckpoint, match=re.escape(str(file))):
            read_checkpoint(path)
    file.write_bytes(content)
    read_checkpoint(path)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_missing_file_is_corrupt(tmp_path, name):
    path = write_checkpoint(tmp_path, 5)
    (path / name).unlink()
    with pytest.raises(BadCheckpoint, match=rf"{path.name}.*No such file"):
        read_checkpoint(path)


def test_longer_file_is_corrupt(tmp_path):
    path = write_checkpoint(tmp_path, 5)
    (path / FIRST_SHARE).write_bytes(CONTENT + b" ")
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)


@pytest.fixture
def three_checkpoints(tmp_path):
    """Checkpoints of steps 1 to 3, of which only the first is good."""
    return [write_checkpoint(tmp_path, step, good=step == 1) for step in (1, 2, 3)]


def test_newest_checkpoint_is_found(tmp_path, three_checkpoints):
    newest, corrupt = newest_checkpoint(tmp_path)
    assert newest.path == three_checkpoints[-1]
    assert corrupt == []


def test_newest_good_checkpoint_is_found(tmp_path, three_checkpoints):
    newest, corrupt = newest_checkpoint(tmp_path, only_good=True)
    assert newest.path == three_checkpoints[0]
    assert corrupt == []


def test_corrupt_checkpoints_are_skipped_with_a_reason(tmp_path, three_checkpoints):
    oldest, middle, newest = three_checkpoints
    (newest / FIRST_SHARE).write_bytes(CONTENT[:-1])
    (middle / "manifest.json").unlink()
    intact, corrupt = newest_checkpoint(tmp_path)
    assert (intact.path, intact.manifest.state.step) == (oldest, 1)
    assert [checkpoint.path for checkpoint in corrupt] == [newest, middle]
    assert "1,023 bytes, expected 1,024" in corrupt[0].reason


def test_all_checkpoints_may_be_corrupt(tmp_path, three_checkpoints):
    for path in three_checkpoints:
        (path / "manifest.json").write_text("")
    newest, corrupt = newest_checkpoint(tmp_path)
    assert newest is None
    assert len(corrupt) == 3


def test_leftovers_of_earlier_starts_are_removed(tmp_path):
    path = write_checkpoint(tmp_path, 5)
    put_aside = tmp_path / "step-000000003.corrupt-1"
    kept = {*tmp_path.iterdir(), put_aside}
    leftovers = [
        tmp_path / ".step-000000006.attempt-1.partial",
        tmp_path / ".step-000000004.0a0b0c0d.removed",
        tmp_path / ".step-000000005.0a0b0c0d.replaced",
    ]
    for directory in (*leftovers, put_aside):
        directory.mkdir()
        (directory / FIRST_SHARE).write_bytes(b"x")
    format.clear_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == kept
    read_checkpoint(path)


def assert_manifest_rejected(root, change, message):
    """Check that a checkpoint is rejected once its manifest is changed."""
    path = write_checkpoint(root)
    change_manifest(path, change)
    with pytest.raises(BadCheckpoint, match=message):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["../rank-00000.safetensors", "/etc/passwd", "..", "", "a\0b"]
)
def test_rejects_files_in_other_directories(tmp_path, name):
    def change(table):
        table["files"][0]["name"] = name
        table["tensors"]["weights.a"]["parts"][0]["file"] = name

    assert_manifest_rejected(tmp_path, change, "refers to files in other directories")


def test_rejects_part_in_an_unlisted_file(tmp_path):
    def change(table):
        table["tensors"]["weights.a"]["parts"][0]["file"] = "rank-00001.safetensors"

    assert_manifest_rejected(tmp_path, change, "does not list all of its files")


def test_rejects_unknown_key(tmp_path):
    def change(table):
        table["unknown"] = 1

    assert_manifest_rejected(tmp_path, change, "unknown")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint that the examples of one test share."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def assert_corrupt_with(path, manifest):
    """Check that a checkpoint with these bytes as manifest is corrupt, and skipped."""
    (path / "manifest.json").write_bytes(manifest)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)
    newest, _ = newest_checkpoint(path.parent)
    assert newest is None
    prune(path.parent, keep_last=1, keep_every_steps=None)


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(sorted(CheckpointManifest.model_fields)), value=json_values)
def test_rejects_any_other_value(checkpoint, key, value):
    path = write_checkpoint(checkpoint.parent)
    table = json.loads((path / "manifest.json").read_text())
    # A checkpoint without tensors or files is valid, as is any text as time.
    assume(value != table[key])
    assume((key, value) not in [("tensors", {}), ("files", [])])
    assume(not (key == "written_utc" and isinstance(value, str)))
    change_manifest(path, lambda table: table.update({key: value}))
    assert_corrupt_with(path, (path / "manifest.json").read_bytes())


@settings(max_examples=100, deadline=None)
@given(
    manifest=st.binary(max_size=200)
    | st.text().map(str.encode)
    | json_values.map(lambda value: json.dumps(value).encode())
)
# Deeper than our limit, and than Python's limit of recursion.
@example(manifest=b'{"a":' * 100 + b"1" + b"}" * 100)
@example(manifest=b"[" * 200_000)
# Values that Python reads as JSON, but that have no canonical form to be hashed.
@example(manifest=b"NaN")
@example(manifest=b'{"state": NaN}')
@example(manifest=b'{"a": "\\ud800"}')
# A number of too many digits for Python, and a file above our limit.
@example(manifest=b"9" * 5000)
@example(manifest=b" " * (64 * 2**20 + 1))
def test_rejects_any_bytes_as_manifest(checkpoint, manifest):
    assert_corrupt_with(checkpoint, manifest)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.parametrize("error_number", [errno.ESTALE, errno.EIO])
def test_unreachable_checkpoint_is_not_corrupt(
    tmp_path, monkeypatch, name, error_number
):
    path = write_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 6, good=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing_method(name, error_number))
        with pytest.raises(DiskTrouble, match=os.strerror(error_number)) as raised:
            read_checkpoint(path)
        with pytest.raises(DiskTrouble):  # no older one is taken in its place
            newest_checkpoint(tmp_path)
    assert raised.value.exit_code == 75
    read_checkpoint(path)


@pytest.mark.parametrize("error_number", [errno.ESTALE, errno.EIO])
def test_prune_removes_nothing_while_unreachable(tmp_path, monkeypatch, error_number):
    # The newest good one may be among those that cannot be read.
    write_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 6, good=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing_method("manifest.json", error_number))
        with pytest.raises(DiskTrouble, match=os.strerror(error_number)):
            prune(tmp_path, keep_last=1, keep_every_steps=None)
    assert steps_in(tmp_path) == [6, 5]


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_checkpoint_without_permission_is_not_corrupt(
    tmp_path, monkeypatch, deny_reading, name
):
    path = write_checkpoint(tmp_path)
    deny_reading(name)
    with pytest.raises(BadConfig, match="Permission denied") as raised:
        read_checkpoint(path)
    assert str(path / name) in raised.value.message
    assert "readable for this user" in raised.value.next_step
    monkeypatch.undo()
    read_checkpoint(path)
