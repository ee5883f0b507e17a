"""Checkpoints that a manager restores, after a rollback or at the start of a run."""

import pytest
import torch

from testbed.examples.checkpoints import state_of, write_checkpoint
from tests.trainer.checkpoint.saves import SHARE, save
from trainer.formats.errors import TrainingFailed


def test_rollback_needs_a_good_checkpoint(manager_of):
    with pytest.raises(TrainingFailed, match="no good checkpoint exists"):
        manager_of().newest_good()


def test_rollback_returns_to_the_newest_good_checkpoint(manager_of, events, root):
    write_checkpoint(root, 1)
    good = write_checkpoint(root, 2)
    corrupt = write_checkpoint(root, 3)
    write_checkpoint(root, 4, good=False)
    (corrupt / SHARE).write_bytes(b"")
    checkpoint = manager_of().newest_good()
    assert (checkpoint.path, checkpoint.manifest.state.step) == (good, 2)
    (event,) = events
    assert event.kind == "corrupt"
    assert "step-000000003" in event.message


def test_saved_state_is_restored(manager_of, training):
    manager = manager_of()
    manager.save(state_of(4), rollbacks=0)
    weight = next(training.module.parameters())
    saved_weight = weight.detach().clone()
    checkpoint = manager.newest_good()
    with torch.no_grad():
        weight.zero_()
    manager.last_state_step = None
    manager.restore(checkpoint.path, checkpoint.manifest)
    assert torch.equal(weight, saved_weight)
    assert manager.last_state_step == 4
    assert manager.owns(checkpoint.path)
    assert manager.newest == "step-000000004"
    assert manager.has_saved(4)


def test_checkpoint_of_another_run_is_not_newest(manager_of, training, tmp_path):
    other_run = manager_of(tmp_path / "other")
    save(other_run, 4)
    weight = next(training.module.parameters())
    saved_weight = weight.detach().clone()
    checkpoint = other_run.newest_good()
    with torch.no_grad():
        weight.zero_()
    manager = manager_of(tmp_path / "run")
    manager.restore(checkpoint.path, checkpoint.manifest)
    assert torch.equal(weight, saved_weight)
    assert manager.last_state_step == 4
    assert not manager.owns(checkpoint.path)
    assert manager.newest is None
    assert not manager.has_saved(4)
