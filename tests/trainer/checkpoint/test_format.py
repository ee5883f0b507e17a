import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

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
    checkpoint_name,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_checkpoint,
)
from trainer.errors import BadConfig, DiskTrouble
from trainer.health.watchdog import REQUEUE

MANIFEST = "manifest.json"
SHARE = "rank-00000.safetensors"
CHECKPOINT_FILES = [MANIFEST, SHARE]
DAMAGES = 15
"""Number of random damages that each file is tested with."""


def steps_in(root):
    """Return the steps of all checkpoints, newest first."""
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


def test_checkpoints_after_a_rollback_are_newer(tmp_path):
    newest_first = [
        "step-000000005-rollback-10",  # as text, 10 would sort before 2
        "step-000000005-rollback-2",
        "step-000000010-rollback-1",
        "step-1000000000",  # as text, 10 digits would sort before 9
        "step-000000020",
        "step-000000005",
    ]
    for name in sorted(newest_first):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == newest_first


@pytest.mark.parametrize(
    ("step", "rollbacks", "name"),
    [
        pytest.param(5, 0, "step-000000005", id="no rollback"),
        pytest.param(5, 10, "step-000000005-rollback-10", id="ten rollbacks"),
        pytest.param(1_000_000_000, 0, "step-1000000000", id="ten digits"),
    ],
)
def test_name_tells_the_step(step, rollbacks, name):
    assert checkpoint_name(step, rollbacks) == name
    assert format.step_of(name) == step


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


def test_prune_removes_old_checkpoints(tmp_path):
    for step in range(1, 10):
        write_checkpoint(tmp_path, step, good=step in (2, 5))
    removed = prune(tmp_path, keep_last=2, keep_every_steps=3)
    # The last two are 9 and 8, multiples of three are 9, 6 and 3, and the newest good
    # one is 5.
    assert steps_in(tmp_path) == [9, 8, 6, 5, 3]
    assert sorted(removed) == [checkpoint_name(step, 0) for step in (1, 2, 4, 7)]
    assert not hidden_files(tmp_path)
    assert prune(tmp_path, keep_last=2, keep_every_steps=3) == []


def test_prune_keeps_newest_intact_good_checkpoint(tmp_path):
    for step in (5, 7, 9):
        write_checkpoint(tmp_path, step, good=step < 9)
    (tmp_path / checkpoint_name(7, 0) / MANIFEST).write_text("{}")
    prune(tmp_path, keep_last=1, keep_every_steps=None)
    assert steps_in(tmp_path) == [9, 5]


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_truncated_file_is_named(tmp_path, name):
    path = write_checkpoint(tmp_path, 5)
    file = path / name
    content = file.read_bytes()
    for length in np.random.default_rng(0).integers(len(content), size=DAMAGES):
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
    for _ in range(DAMAGES):
        damaged = bytearray(content)
        damaged[random.integers(len(content))] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged)
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
    (path / SHARE).write_bytes(CONTENT + b" ")
    with pytest.raises(BadCheckpoint, match="1,025 bytes, expected 1,024"):
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
    (newest / SHARE).write_bytes(CONTENT[:-1])
    (middle / MANIFEST).unlink()
    intact, corrupt = newest_checkpoint(tmp_path)
    assert (intact.path, intact.manifest.state.step) == (oldest, 1)
    assert [checkpoint.path for checkpoint in corrupt] == [newest, middle]
    assert "1,023 bytes, expected 1,024" in corrupt[0].reason


def test_all_checkpoints_may_be_corrupt(tmp_path, three_checkpoints):
    for path in three_checkpoints:
        (path / MANIFEST).write_text("")
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
        (directory / SHARE).write_bytes(b"x")
    format.clear_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == kept
    read_checkpoint(path)


passing_errors = pytest.mark.parametrize(
    "error_number",
    [pytest.param(errno.ESTALE, id="ESTALE"), pytest.param(errno.EIO, id="EIO")],
)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@passing_errors
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
    assert raised.value.exit_code == REQUEUE  # a restart finds it again
    read_checkpoint(path)


@passing_errors
def test_prune_removes_nothing_while_unreachable(tmp_path, monkeypatch, error_number):
    # The newest good one may be among those that cannot be read.
    write_checkpoint(tmp_path)
    write_checkpoint(tmp_path, 6, good=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing_method(MANIFEST, error_number))
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
