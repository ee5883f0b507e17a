import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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
    CheckpointWriter,
    checkpoint_name,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_checkpoint,
)
from trainer.config.tables import canonical_sha256
from trainer.errors import BadConfig, DiskTrouble

FIRST_SHARE = "rank-00000.safetensors"


def write_share(
    root,
    rank,
    writers,
    begin=0,
    end=4,
    *,
    content=CONTENT,
    timeout_s=10.0,
    **options,
):
    """Write one rank's share of step 5: ``begin`` to ``end`` of the tensor."""
    writer = CheckpointWriter(
        root,
        checkpoint_name(5, 0),
        attempt=1,
        rank=rank,
        writers=writers,
        timeout_s=timeout_s,
        **options,
    )
    writer.write(memoryview(content), tensor_entries(rank, begin, end), state_of())


def change_manifest(path, change):
    """Change a checkpoint's manifest, and its hash to match, as an attacker would."""
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


def test_repeated_step_replaces_its_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 5, content=b"other")
    path = write_checkpoint(tmp_path, 5)
    assert (path / FIRST_SHARE).read_bytes() == CONTENT
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == [path]


def test_manifest_text_is_parsed_back(tmp_path):
    manifest = read_checkpoint(write_checkpoint(tmp_path, 5))
    table = json.loads(format.manifest_text(manifest))
    assert format.parse_manifest(table, "a manifest") == manifest


NEWEST_FIRST = [(5, 10), (5, 2), (10, 1), (1_000_000_000, 0), (20, 0), (5, 0)]
"""Step and number of rollbacks of checkpoints."""


def test_checkpoints_after_a_rollback_are_newer(tmp_path):
    names = [checkpoint_name(step, rollbacks) for step, rollbacks in NEWEST_FIRST]
    for name in sorted(names):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == names
    assert steps_in(tmp_path) == [step for step, _ in NEWEST_FIRST]


def test_other_entries_are_not_checkpoints(tmp_path):
    for name in (
        "step-5",
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


def test_latest_names_the_newest_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 6, rollbacks=1)
    assert (tmp_path / "latest").read_text() == "step-000000006-rollback-1\n"


def test_prune_keeps_last_milestones_and_newest_good(tmp_path):
    for step in range(1, 10):
        write_checkpoint(tmp_path, step, good=step in (2, 5))
    removed = prune(tmp_path, keep_last=2, keep_every_steps=3)
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


def test_shares_are_joined_in_order(tmp_path):
    writers = [0, 2, 3]
    for rank in (3, 2, 0):  # the first waits for all others
        content = bytes([rank]) * 10 + b"end"
        write_share(tmp_path, rank, writers, 3 - rank, 4 - rank, content=content)
    (path,) = list_checkpoints(tmp_path)
    manifest = read_checkpoint(path)
    assert [part.begin for part in manifest.tensors["weights.a"].parts] == [0, 1, 3]
    names = [f"rank-0000{rank}.safetensors" for rank in writers]
    assert [file.name for file in manifest.files] == names
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *names]
    assert (path / names[1]).read_bytes() == b"\2" * 10 + b"end"


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


def _fail_on_full_disk(root, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", Mock(side_effect=FULL_DISK))
        write_share(root, 1, [0, 1])


def _give_up_before_writing(root, monkeypatch):
    writer = CheckpointWriter(
        root, checkpoint_name(5, 0), attempt=1, rank=1, writers=[0, 1], timeout_s=1.0
    )
    writer.give_up(MemoryError("no room"))


@pytest.mark.parametrize(
    ("fail", "error_number"),
    [
        pytest.param(_fail_on_full_disk, errno.ENOSPC, id="full disk"),
        pytest.param(_give_up_before_writing, errno.EIO, id="before writing"),
    ],
)
def test_failure_of_a_writer_fails_the_save(tmp_path, monkeypatch, fail, error_number):
    old = write_checkpoint(tmp_path, 1)
    fail(tmp_path, monkeypatch)
    with pytest.raises(OSError, match="rank 1 could not write its file") as raised:
        write_share(tmp_path, 0, [0, 1])
    # Whether older checkpoints are removed depends on it.
    assert raised.value.errno == error_number
    assert list_checkpoints(tmp_path) == [old]
    assert not hidden_files(tmp_path)


def test_late_writer_fails_the_save(tmp_path):
    old = write_checkpoint(tmp_path, 1)
    with pytest.raises(
        TimeoutError, match=r"rank 1 has not written its file within 0\.2 s"
    ):
        write_share(tmp_path, 0, [0, 1], timeout_s=0.2)
    assert list_checkpoints(tmp_path) == [old]
    assert not hidden_files(tmp_path)


@pytest.fixture
def fail_sync(monkeypatch):
    """Return a function that makes one call of ``fsync`` fail, as on a full disk."""

    def fail(failing_call):
        calls = []
        sync = os.fsync

        def sometimes_full(fd):
            calls.append(fd)
            if len(calls) == failing_call:
                raise FULL_DISK
            sync(fd)

        monkeypatch.setattr(os, "fsync", sometimes_full)

    return fail


@pytest.mark.parametrize(
    "failing_call",
    [
        pytest.param(1, id="share"),
        pytest.param(2, id="manifest"),
        pytest.param(3, id="directory"),
    ],
)
def test_full_disk_keeps_old_checkpoints(
    tmp_path, monkeypatch, fail_sync, failing_call
):
    old = write_checkpoint(tmp_path, 1)
    fail_sync(failing_call)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path, 2)
    assert list_checkpoints(tmp_path) == [old]
    read_checkpoint(old)
    assert (tmp_path / "latest").read_text() == "step-000000001\n"
    assert not hidden_files(tmp_path)
    monkeypatch.undo()
    assert write_checkpoint(tmp_path, 2) == list_checkpoints(tmp_path)[0]


def test_checkpoint_counts_even_if_latest_fails(tmp_path, fail_sync):
    write_checkpoint(tmp_path, 1)
    fail_sync(4)
    write_checkpoint(tmp_path, 2)
    assert steps_in(tmp_path) == [2, 1]
    assert (tmp_path / "latest").read_text() == "step-000000001\n"
    assert not hidden_files(tmp_path)
    for path in list_checkpoints(tmp_path):
        read_checkpoint(path)


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


def rejects_manifest(root, change, message):
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

    rejects_manifest(tmp_path, change, "refers to files in other directories")


def test_rejects_part_in_an_unlisted_file(tmp_path):
    def change(table):
        table["tensors"]["weights.a"]["parts"][0]["file"] = "rank-00001.safetensors"

    rejects_manifest(tmp_path, change, "does not list all of its files")


def test_rejects_unknown_key(tmp_path):
    def change(table):
        table["unknown"] = 1

    rejects_manifest(tmp_path, change, "unknown")


JSON = st.recursive(
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


def is_corrupt_with(path, manifest):
    """Check that a checkpoint with these bytes as manifest is corrupt, and skipped."""
    (path / "manifest.json").write_bytes(manifest)
    with pytest.raises(BadCheckpoint):
        read_checkpoint(path)
    newest, _ = newest_checkpoint(path.parent)
    assert newest is None
    prune(path.parent, keep_last=1, keep_every_steps=None)


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(sorted(CheckpointManifest.model_fields)), value=JSON)
def test_rejects_any_other_value(checkpoint, key, value):
    path = write_checkpoint(checkpoint.parent)
    table = json.loads((path / "manifest.json").read_text())
    # These are valid.
    assume(value != table[key])
    assume((key, value) not in [("tensors", {}), ("files", [])])
    assume(not (key == "written_utc" and isinstance(value, str)))
    change_manifest(path, lambda table: table.update({key: value}))
    is_corrupt_with(path, (path / "manifest.json").read_bytes())


@settings(max_examples=100, deadline=None)
@given(
    manifest=st.binary(max_size=200)
    | st.text().map(str.encode)
    | JSON.map(lambda value: json.dumps(value).encode())
)
@example(manifest=b'{"a":' * 100 + b"1" + b"}" * 100)
@example(manifest=b"[" * 200_000)
@example(manifest=b"NaN")
@example(manifest=b'{"state": NaN}')
@example(manifest=b'{"a": "\\ud800"}')
@example(manifest=b"9" * 5000)
@example(manifest=b" " * (64 * 2**20 + 1))
def test_rejects_any_bytes_as_manifest(checkpoint, manifest):
    is_corrupt_with(checkpoint, manifest)


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
        with pytest.raises(DiskTrouble):  # and no older one is taken in its place
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


def test_save_removes_earlier_saves_of_its_start(tmp_path):
    write_share(tmp_path, 1, [0, 1], number=1)  # after the first one gave up
    other_start = tmp_path / ".step-000000004.attempt-11.save-1.partial"
    other_start.mkdir()
    write_share(tmp_path, 1, [0, 1], 2, 4, number=2)
    assert len(list(tmp_path.glob(".*.partial"))) == 3
    write_share(tmp_path, 0, [0, 1], 0, 2, number=2)
    assert list(tmp_path.glob(".*.partial")) == [other_start]
    read_checkpoint(tmp_path / checkpoint_name(5, 0))


def test_growing_share_is_waited_for(tmp_path, monkeypatch):
    partial = tmp_path / ".step-000000005.attempt-1.save-1.partial"
    share = partial / "rank-00001.safetensors"
    sleeps = []
    sleeps_at_progress = set()

    def now_s():
        return 1000 + 0.9 * len(sleeps)

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 20:
            write_share(tmp_path, 1, [0, 1], 2, 4)
        elif len(sleeps) < 20:
            with share.open("ab") as file:
                file.write(b"x")

    monkeypatch.setattr(format, "time", SimpleNamespace(monotonic=now_s, sleep=sleep))
    write_share(
        tmp_path,
        0,
        [0, 1],
        0,
        2,
        timeout_s=1.0,
        progressed=lambda: sleeps_at_progress.add(len(sleeps)),
    )
    read_checkpoint(tmp_path / checkpoint_name(5, 0))
    assert now_s() - 1000 > 15
    # So that the watchdog does not take the rank for hung.
    assert len(sleeps_at_progress) == 20
