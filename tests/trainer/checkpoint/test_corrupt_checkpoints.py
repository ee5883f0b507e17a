"""Checkpoints that are corrupt, and those that only cannot be reached or read."""

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from testbed.examples.checkpoints import CONTENT, failing_method, write_checkpoint
from tests.trainer.checkpoint.saves import SHARE
from trainer.checkpoint.format import MANIFEST_FILE, BadCheckpoint
from trainer.checkpoint.stored_checkpoints import newest_checkpoint, read_checkpoint
from trainer.formats.errors import BadConfig, DiskTrouble
from trainer.health.watchdog import REQUEUE

DAMAGES = 15
"""Number of random damages that each file is tested with."""
each_file = pytest.mark.parametrize(
    "name",
    [pytest.param(MANIFEST_FILE, id="manifest"), pytest.param(SHARE, id="tensors")],
)


@each_file
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


@each_file
def test_file_with_a_flipped_bit_is_named(tmp_path, name):
    path = write_checkpoint(tmp_path, 5)
    file = path / name
    content = file.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(DAMAGES):
        damaged = bytearray(content)
        position = random.integers(len(content))
        bit = int(random.integers(8))
        damaged[position] ^= 1 << bit
        file.write_bytes(damaged)
        with pytest.raises(BadCheckpoint, match=re.escape(str(file))):
            read_checkpoint(path)
    file.write_bytes(content)
    read_checkpoint(path)


@each_file
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
    """Checkpoints of steps 1 to 3."""
    return [write_checkpoint(tmp_path, step) for step in (1, 2, 3)]


def test_corrupt_checkpoints_are_skipped_with_a_reason(tmp_path, three_checkpoints):
    oldest, middle, newest = three_checkpoints
    (newest / SHARE).write_bytes(CONTENT[:-1])
    (middle / MANIFEST_FILE).unlink()
    intact, corrupt = newest_checkpoint(tmp_path)
    assert (intact.path, intact.manifest.state.step) == (oldest, 1)
    assert [checkpoint.path for checkpoint in corrupt] == [newest, middle]
    assert "1,023 bytes, expected 1,024" in corrupt[0].reason


def test_all_checkpoints_may_be_corrupt(tmp_path, three_checkpoints):
    for path in three_checkpoints:
        (path / MANIFEST_FILE).write_text("")
    newest, corrupt = newest_checkpoint(tmp_path)
    assert newest is None
    assert len(corrupt) == 3


@each_file
@pytest.mark.parametrize(
    "error_number",
    [pytest.param(errno.ESTALE, id="ESTALE"), pytest.param(errno.EIO, id="EIO")],
)
def test_unreachable_checkpoint_is_not_corrupt(
    tmp_path, monkeypatch, name, error_number
):
    path = write_checkpoint(tmp_path, 5)
    write_checkpoint(tmp_path, 6, good=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing_method(name, error_number))
        with pytest.raises(DiskTrouble, match=os.strerror(error_number)) as raised:
            read_checkpoint(path)
        with pytest.raises(DiskTrouble):  # no older one is taken in its place
            newest_checkpoint(tmp_path)
    assert raised.value.exit_code == REQUEUE  # a restart finds it again
    read_checkpoint(path)


@each_file
def test_checkpoint_without_permission_is_not_corrupt(
    tmp_path, monkeypatch, deny_reading, name
):
    path = write_checkpoint(tmp_path, 5)
    deny_reading(name)
    with pytest.raises(BadConfig, match="Permission denied") as raised:
        read_checkpoint(path)
    assert str(path / name) in raised.value.message
    assert "readable for this user" in raised.value.next_step
    monkeypatch.undo()
    read_checkpoint(path)
