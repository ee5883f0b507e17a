"""Checkpoints that one or more ranks write, also if a rank fails or is slow."""

import errno
import os
from unittest.mock import Mock, patch

import pytest

from testbed.examples.checkpoints import (
    CONTENT,
    state_of,
    tensor_entries,
    write_checkpoint,
)
from tests.trainer.checkpoint.saves import hidden_files
from trainer.checkpoint import checkpoint_writer
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.format import checkpoint_name, step_of
from trainer.checkpoint.stored_checkpoints import list_checkpoints, read_checkpoint

STEP_5 = checkpoint_name(step=5, rollbacks=0)
PARTIAL_STEP_5 = f".{STEP_5}.attempt-1.save-1.partial"
"""Directory of the checkpoint of step 5 while ranks write their shares."""


def writer_of(root, *, rank, writing_ranks=(0, 1), timeout_s=10.0, **options):
    """Return the writer of a rank's share of the checkpoint of step 5."""
    return CheckpointWriter(
        root,
        STEP_5,
        attempt=1,
        rank=rank,
        writing_ranks=writing_ranks,
        timeout_s=timeout_s,
        **options,
    )


def write_share(root, *, rank, begin, end, content=CONTENT, **options):
    """Write a rank's share of step 5: ``begin`` to ``end`` of a tensor of length 4."""
    writer = writer_of(root, rank=rank, **options)
    writer.write(memoryview(content), tensor_entries(rank, begin, end), state_of())


def write_first_half(root, **options):
    """Write the share of rank 0, which waits for that of rank 1, and publish."""
    write_share(root, rank=0, begin=0, end=2, **options)


def write_second_half(root, **options):
    """Write the share of rank 1."""
    write_share(root, rank=1, begin=2, end=4, **options)


def full_disk_error():
    return OSError(errno.ENOSPC, "No space left on device")


def test_repeated_step_replaces_its_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 5, content=b"other")
    path = write_checkpoint(tmp_path, 5)
    assert (path / "rank-00000.safetensors").read_bytes() == CONTENT
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == [path]


def test_latest_names_the_newest_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 6, rollbacks=1)
    assert (tmp_path / "latest").read_text() == "step-000000006-rollback-1\n"


@pytest.fixture
def three_shares(tmp_path):
    """A checkpoint of ranks 0, 2 and 3, whose parts are in the opposite order."""

    def write(rank, *, begin, end):
        write_share(
            tmp_path,
            rank=rank,
            writing_ranks=[0, 2, 3],
            begin=begin,
            end=end,
            content=b"content of rank %d" % rank,
        )

    # Rank 0 writes last, as it waits for the other two.
    write(3, begin=0, end=1)
    write(2, begin=1, end=3)
    write(0, begin=3, end=4)
    return tmp_path / STEP_5


def test_parts_are_ordered_by_position(three_shares):
    parts = read_checkpoint(three_shares).tensors["weights.a"].parts
    assert [(part.begin, part.end, part.file) for part in parts] == [
        (0, 1, "rank-00003.safetensors"),
        (1, 3, "rank-00002.safetensors"),
        (3, 4, "rank-00000.safetensors"),
    ]


def test_checkpoint_contains_the_files_of_all_ranks(three_shares):
    files = {path.name: path.read_bytes() for path in three_shares.iterdir()}
    del files["manifest.json"]
    assert files == {
        "rank-00000.safetensors": b"content of rank 0",
        "rank-00002.safetensors": b"content of rank 2",
        "rank-00003.safetensors": b"content of rank 3",
    }
    listed = [file.name for file in read_checkpoint(three_shares).files]
    assert listed == sorted(files)


def fail_on_full_disk(root):
    """Let rank 1 fail to write its share."""
    with (
        patch.object(os, "fsync", Mock(side_effect=full_disk_error())),
        pytest.raises(OSError, match="No space"),
    ):
        write_second_half(root)


def fail_otherwise(root):
    """Let rank 1 fail to write its share, for a reason that has no error number."""
    with (
        patch.object(
            checkpoint_writer, "write_file", Mock(side_effect=ValueError("a bug"))
        ),
        pytest.raises(ValueError, match="a bug"),
    ):
        write_second_half(root)


def give_up_before_writing(root):
    """Let rank 1 give up, as it does without memory for a copy of its tensors."""
    writer_of(root, rank=1).give_up(MemoryError("no room"))


@pytest.mark.parametrize(
    ("fail_rank_1", "error_number"),
    [
        pytest.param(fail_on_full_disk, errno.ENOSPC, id="full disk"),
        pytest.param(fail_otherwise, errno.EIO, id="other error"),
        pytest.param(give_up_before_writing, errno.EIO, id="before writing"),
    ],
)
def test_failure_of_a_writer_fails_the_save(tmp_path, fail_rank_1, error_number):
    old = write_checkpoint(tmp_path, 1)
    fail_rank_1(tmp_path)
    with pytest.raises(OSError, match="rank 1 could not write its file") as raised:
        write_first_half(tmp_path)
    # Whether older checkpoints are removed depends on the error's number.
    assert raised.value.errno == error_number
    assert list_checkpoints(tmp_path) == [old]
    assert not hidden_files(tmp_path)


def test_late_writer_fails_the_save(tmp_path):
    old = write_checkpoint(tmp_path, 1)
    with pytest.raises(
        TimeoutError, match=r"rank 1 has not written its file within 0\.2 s"
    ):
        write_first_half(tmp_path, timeout_s=0.2)
    assert list_checkpoints(tmp_path) == [old]
    assert not hidden_files(tmp_path)


@pytest.fixture
def break_sync(monkeypatch):
    """Return a function that lets one call of ``fsync`` fail, as on a full disk.

    A save of one rank syncs its share, the manifest, the directory, and ``latest``.
    """

    def break_call(failing_call):
        calls = 0
        sync = os.fsync

        def sync_or_fail(fd):
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise full_disk_error()
            sync(fd)

        monkeypatch.setattr(os, "fsync", sync_or_fail)

    return break_call


calls_before_publishing = pytest.mark.parametrize(
    "failing_call",
    [
        pytest.param(1, id="share"),
        pytest.param(2, id="manifest"),
        pytest.param(3, id="directory"),
    ],
)


@calls_before_publishing
def test_full_disk_keeps_old_checkpoints(tmp_path, break_sync, failing_call):
    old = write_checkpoint(tmp_path, 1)
    break_sync(failing_call)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path, 2)
    assert list_checkpoints(tmp_path) == [old]
    read_checkpoint(old)
    assert (tmp_path / "latest").read_text() == "step-000000001\n"
    assert not hidden_files(tmp_path)


@calls_before_publishing
def test_save_succeeds_once_the_disk_has_space(tmp_path, break_sync, failing_call):
    break_sync(failing_call)  # all later calls succeed
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path, 2)
    assert list_checkpoints(tmp_path) == []
    path = write_checkpoint(tmp_path, 2)
    assert list_checkpoints(tmp_path) == [path]
    read_checkpoint(path)


def test_checkpoint_counts_even_if_latest_fails(tmp_path, break_sync):
    write_checkpoint(tmp_path, 1)
    break_sync(4)  # that of ``latest``
    write_checkpoint(tmp_path, 2)
    assert [step_of(path.name) for path in list_checkpoints(tmp_path)] == [2, 1]
    assert (tmp_path / "latest").read_text() == "step-000000001\n"
    assert not hidden_files(tmp_path)
    for path in list_checkpoints(tmp_path):
        read_checkpoint(path)


def test_save_removes_earlier_saves_of_its_start(tmp_path):
    write_second_half(tmp_path, save_number=1)  # after rank 0 had given up this save
    # A pattern for "attempt-1" that is not exact would match "attempt-11" as well.
    save_of_other_start = tmp_path / ".step-000000004.attempt-11.save-1.partial"
    save_of_other_start.mkdir()
    write_second_half(tmp_path, save_number=2)
    assert len(hidden_files(tmp_path)) == 3
    write_first_half(tmp_path, save_number=2)
    assert hidden_files(tmp_path) == [save_of_other_start]
    read_checkpoint(tmp_path / STEP_5)


class SlowRank:
    """Rank 1, which writes a byte of its share whenever rank 0 sleeps.

    It replaces the module ``time`` of rank 0.
    """

    sleep_s = 0.9
    """Time that a sleep takes, whatever its argument."""
    sleeps_until_complete = 20
    """Sleeps after which the share is complete."""

    def __init__(self, root):
        self._root = root
        self.sleeps = 0
        """Number of sleeps so far."""

    def monotonic(self):
        return self.sleeps * self.sleep_s

    def sleep(self, seconds):
        self.sleeps += 1
        if self.sleeps == self.sleeps_until_complete:
            write_second_half(self._root)
        elif self.sleeps < self.sleeps_until_complete:
            share = self._root / PARTIAL_STEP_5 / "rank-00001.safetensors"
            with share.open("ab") as file:
                file.write(b"x")


@pytest.fixture
def slow_rank(tmp_path, monkeypatch):
    slow_rank = SlowRank(tmp_path)
    monkeypatch.setattr(checkpoint_writer, "time", slow_rank)
    return slow_rank


def test_growing_share_is_waited_for(tmp_path, slow_rank):
    # Longer than a sleep of 0.9 s, and far shorter than the 18 s of all 20.
    write_first_half(tmp_path, timeout_s=1.0)
    read_checkpoint(tmp_path / STEP_5)
    assert slow_rank.sleeps == slow_rank.sleeps_until_complete


def test_growth_of_a_share_is_progress(tmp_path, slow_rank):
    # Otherwise, the watchdog would take the waiting rank for hung.
    sleeps_at_progress = set()
    write_first_half(
        tmp_path, progressed=lambda: sleeps_at_progress.add(slow_rank.sleeps)
    )
    # Rank 0 writes its own share before it sleeps, and that of rank 1 is complete after
    # the last sleep.
    assert sleeps_at_progress == set(range(slow_rank.sleeps_until_complete))
