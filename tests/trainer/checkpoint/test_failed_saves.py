"""Saves that fail, after which training continues."""

import errno
from unittest.mock import Mock

import pytest

from testbed.examples.checkpoints import state_of
from tests.trainer.checkpoint.saves import save, steps_in
from trainer.formats.errors import BadConfig


@pytest.mark.parametrize(
    ("failing", "error", "reason"),
    [
        pytest.param(
            "os.fsync",
            OSError(errno.ENOSPC, "No space left on device"),
            "No space left on device",
            id="full disk",
        ),
        pytest.param(
            "trainer.checkpoint.checkpoint_writer.CheckpointWriter.write",
            BadConfig("the share of rank 1 is not a table", next_step=""),
            "BadConfig: the share of rank 1 is not a table",
            id="invalid share of another rank",
        ),
        pytest.param(
            "trainer.checkpoint.async_writer.HostCopy",
            MemoryError("cannot allocate 12 GiB\nand more"),
            "host memory is too small for a copy of the state: cannot allocate 12 GiB",
            id="too little host memory",
        ),
    ],
)
def test_training_continues_after_a_failed_save(
    manager_of, events, monkeypatch, failing, error, reason
):
    with monkeypatch.context() as patch:
        patch.setattr(failing, Mock(side_effect=error))
        manager = manager_of()
        manager.save(state_of(1), rollbacks=0)
        manager.wait()
    assert not manager.has_saved(1)
    save(manager, 2)
    assert [(event.kind, event.level) for event in events] == [
        ("save_failed", "error"),
        ("saved", "info"),
    ]
    message = events[0].message
    assert f"{reason}; no checkpoint exists yet; training continues" in message
    assert manager.has_saved(2)


@pytest.fixture
def four_saves(manager_of):
    """A manager that has saved after steps 1 to 4, of which the first two are good."""
    manager = manager_of(keep_last=5)
    for step in (1, 2, 3, 4):
        save(manager, step, good=step < 3)
    return manager


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_removes_older_checkpoints(
    four_saves, events, root, fail_to_save, error_number
):
    fail_to_save(four_saves, 5, error_number)
    # The newest one is kept, and the newest good one.
    assert steps_in(root) == [4, 2]
    assert (events[-1].kind, four_saves.newest) == ("save_failed", "step-000000004")
    message = events[-1].message
    assert "the newest checkpoint is still step-000000004" in message
    assert message.endswith("; removed step-000000003, step-000000001")


def test_other_disk_faults_remove_no_checkpoint(four_saves, events, root, fail_to_save):
    fail_to_save(four_saves, 5, errno.EIO)
    assert steps_in(root) == [4, 3, 2, 1]
    assert (events[-1].kind, four_saves.newest) == ("save_failed", "step-000000004")
    message = events[-1].message
    assert "the newest checkpoint is still step-000000004" in message
    assert "removed" not in message


def test_save_succeeds_if_older_ones_cannot_be_removed(manager_of, events, monkeypatch):
    manager = manager_of(keep_last=1)
    save(manager, 1)
    error = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(
        "trainer.checkpoint.async_writer.prune", Mock(side_effect=error)
    )
    save(manager, 2)
    assert [event.kind for event in events] == ["saved", "not_removed", "saved"]
    assert events[1].level == "warning"
    assert "Operation not permitted" in events[1].message
    assert manager.newest == "step-000000002"
