"""Checkpoints that pruning removes, and leftovers that a start removes."""

import errno
import os
from pathlib import Path

import pytest

from testbed.examples.checkpoints import failing_method, write_checkpoint
from tests.trainer.checkpoint.saves import SHARE, hidden_files, steps_in
from trainer.checkpoint.format import MANIFEST_FILE, checkpoint_name
from trainer.checkpoint.stored_checkpoints import (
    clear_leftovers,
    prune,
    read_checkpoint,
)
from trainer.formats.errors import DiskTrouble


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
    (tmp_path / checkpoint_name(7, 0) / MANIFEST_FILE).write_text("{}")
    prune(tmp_path, keep_last=1, keep_every_steps=None)
    assert steps_in(tmp_path) == [9, 5]


@pytest.mark.parametrize(
    "error_number",
    [pytest.param(errno.ESTALE, id="ESTALE"), pytest.param(errno.EIO, id="EIO")],
)
def test_prune_removes_nothing_while_unreachable(tmp_path, monkeypatch, error_number):
    # The newest good one may be among those that cannot be read.
    write_checkpoint(tmp_path, 5)
    write_checkpoint(tmp_path, 6, good=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing_method(MANIFEST_FILE, error_number))
        with pytest.raises(DiskTrouble, match=os.strerror(error_number)):
            prune(tmp_path, keep_last=1, keep_every_steps=None)
    assert steps_in(tmp_path) == [6, 5]


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
    clear_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == kept
    read_checkpoint(path)
