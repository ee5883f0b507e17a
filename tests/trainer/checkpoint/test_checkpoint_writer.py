import errno
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from testbed.examples.checkpoints import (
    CONTENT,
    state_of,
    tensor_entries,
    write_checkpoint,
)
from trainer.checkpoint import checkpoint_writer
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.format import (
    checkpoint_name,
    list_checkpoints,
    read_checkpoint,
    step_of,
)

FIRST_SHARE = "rank-00000.safetensors"
FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


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


def hidden_files(root):
    return list(root.glob(".*"))


def test_repeated_step_replaces_its_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 5, content=b"other")
    path = write_checkpoint(tmp_path, 5)
    assert (path / FIRST_SHARE).read_bytes() == CONTENT
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == [path]


def test_latest_names_the_newest_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 6, rollbacks=1)
    assert (tmp_path / "latest").read_text() == "step-000000006-rollback-1\n"


def test_shares_are_joined_in_order(tmp_path):
    writers = [0, 2, 3]
    for rank in (3, 2, 0):  # the first waits for all others
        content = bytes([rank]) * 10 + b"end"
        write_share(
            tmp_path, rank, writers, begin=3 - rank, end=4 - rank, content=content
        )
    (path,) = list_checkpoints(tmp_path)
    manifest = read_checkpoint(path)
    assert [part.begin for part in manifest.tensors["weights.a"].parts] == [0, 1, 3]
    names = [f"rank-0000{rank}.safetensors" for rank in writers]
    assert [file.name for file in manifest.files] == names
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *names]
    assert (path / names[1]).read_bytes() == b"\2" * 10 + b"end"


def _fail_on_full_disk(root, monkeypatch):
    """Let rank 1 fail to write its share."""
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", Mock(side_effect=FULL_DISK))
        write_share(root, 1, [0, 1])


def _give_up_before_writing(root, monkeypatch):
    """Let rank 1 give up, as without memory for a copy of its tensors."""
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
    # Whether older checkpoints are removed depends on the error's number.
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
    fail_sync(4)  # after share, manifest and directory
    write_checkpoint(tmp_path, 2)
    assert [step_of(path.name) for path in list_checkpoints(tmp_path)] == [2, 1]
    assert (tmp_path / "latest").read_text() == "step-000000001\n"
    assert not hidden_files(tmp_path)
    for path in list_checkpoints(tmp_path):
        read_checkpoint(path)


def test_save_removes_earlier_saves_of_its_start(tmp_path):
    write_share(tmp_path, 1, [0, 1], number=1)  # after the first one gave up
    other_start = tmp_path / ".step-000000004.attempt-11.save-1.partial"
    other_start.mkdir()
    write_share(tmp_path, 1, [0, 1], begin=2, end=4, number=2)
    assert len(list(tmp_path.glob(".*.partial"))) == 3
    write_share(tmp_path, 0, [0, 1], begin=0, end=2, number=2)
    assert list(tmp_path.glob(".*.partial")) == [other_start]
    read_checkpoint(tmp_path / checkpoint_name(5, 0))


class SlowRank:
    """Rank 1, which writes a byte of its share whenever rank 0 sleeps.

    It stands in for the module ``time`` of rank 0. A sleep takes 0.9 s, and the share
    is complete after the 20th.
    """

    sleep_s = 0.9
    complete_after = 20

    def __init__(self, root):
        self._root = root
        self.sleeps = 0

    def monotonic(self):
        return self.sleeps * self.sleep_s

    def sleep(self, seconds):
        self.sleeps += 1
        if self.sleeps == self.complete_after:
            write_share(self._root, 1, [0, 1], begin=2, end=4)
        elif self.sleeps < self.complete_after:
            partial = self._root / ".step-000000005.attempt-1.save-1.partial"
            with (partial / "rank-00001.safetensors").open("ab") as file:
                file.write(b"x")


def test_growing_share_is_waited_for(tmp_path, monkeypatch):
    slow_rank = SlowRank(tmp_path)
    clock = SimpleNamespace(monotonic=slow_rank.monotonic, sleep=slow_rank.sleep)
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    sleeps_at_progress = set()
    write_share(
        tmp_path,
        0,
        [0, 1],
        begin=0,
        end=2,
        timeout_s=1.0,
        progressed=lambda: sleeps_at_progress.add(slow_rank.sleeps),
    )
    read_checkpoint(tmp_path / checkpoint_name(5, 0))
    assert slow_rank.monotonic() > 15  # far beyond the timeout
    # Progress after every sleep, so that the watchdog does not take the rank for hung.
    assert len(sleeps_at_progress) == slow_rank.complete_after
