import errno
import os

import pytest
import torch

from tests.trainer.checkpoints import state_of, write_checkpoint
from tests.trainer.oracles import config_of, training_of
from trainer.checkpoint import CHECKPOINTS_DIRECTORY
from trainer.config import CheckpointSettings
from trainer.dataset import TokenDataset
from trainer.errors import TrainingFailed
from trainer.keeper import Keeper, state_bytes
from trainer.parallel import join_ranks


@pytest.fixture
def training(patterned_dataset):
    return training_of(config_of(), TokenDataset.open(patterned_dataset))


@pytest.fixture
def told():
    return []


@pytest.fixture
def keeper_of(training, tmp_path, told):
    def make(**settings) -> Keeper:
        config = config_of(checkpoint=CheckpointSettings(**settings))
        ranks = join_ranks(config, environment={})
        return Keeper(tmp_path, config, training, ranks, attempt=1, tell_event=told.append)

    return make


def test_a_save_is_due_after_every_so_many_steps(keeper_of):
    keeper = keeper_of(interval_steps=3)
    assert [step for step in range(1, 8) if keeper.is_due(step, None)] == [3, 6]
    assert not any(keeper_of().is_due(step, None) for step in range(1, 8))
    assert not any(keeper_of(interval_steps=3, enabled=False).is_due(step, None) for step in range(1, 8))


def test_a_save_is_due_when_the_first_rank_asks_unless_it_asked_before_the_last_save(keeper_of):
    keeper = keeper_of()
    assert keeper.is_due(5, asked_at=4)
    keeper.save(state_of(5), rollbacks=0, wait=True)
    assert not keeper.is_due(6, asked_at=4)
    assert not keeper.is_due(6, asked_at=5)
    assert keeper.is_due(7, asked_at=6)


class _Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_save_is_due_by_time_when_the_last_is_long_enough_ago(keeper_of, monkeypatch):
    clock = _Clock()
    monkeypatch.setattr("trainer.keeper.time", clock)
    keeper = keeper_of(interval_s=60.0)
    clock.now_s += 59
    assert not keeper.is_due_by_time()
    clock.now_s += 1
    assert keeper.is_due_by_time()
    keeper.save(state_of(5), rollbacks=0, wait=True)
    assert not keeper.is_due_by_time()
    disabled = keeper_of(interval_s=60.0, enabled=False)
    clock.now_s += 60
    assert keeper.is_due_by_time()
    assert not disabled.is_due_by_time()


def test_a_save_takes_as_long_as_the_last_one_or_as_a_guess_that_grows_with_the_state(keeper_of, training, told):
    assert keeper_of(enabled=False).seconds_of_a_save() == 0
    keeper = keeper_of()
    assert keeper.seconds_of_a_save() == pytest.approx(1 + state_bytes(training) / 100e6)
    keeper.save(state_of(5), rollbacks=0, wait=True)
    keeper.tell_finished()
    assert keeper.seconds_of_a_save() == told[-1].values["seconds"]


def test_the_state_is_weights_and_two_numbers_for_each_that_is_trained(training):
    weights = sum(one.numel() for one in training.module.parameters())
    assert state_bytes(training) == 3 * 4 * weights
    next(training.module.parameters()).requires_grad_(False)
    frozen = next(training.module.parameters()).numel()
    assert state_bytes(training) == 4 * (3 * weights - 2 * frozen)


def test_a_save_becomes_an_event_when_it_has_ended(keeper_of, told):
    keeper = keeper_of(keep_last=1)
    for step in (1, 2):
        keeper.save(state_of(step), rollbacks=0)
    assert keeper.at_step == 2
    keeper.wait()
    assert [event.kind for event in told] == ["saved", "saved"]
    assert told[1].message == "saved step-000000002; removed step-000000001"
    assert keeper.newest == "step-000000002"
    assert told[1].values["size_bytes"] > 0


def test_a_failed_save_says_what_is_still_there_and_training_goes_on(keeper_of, told, monkeypatch):
    keeper = keeper_of()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        keeper.save(state_of(1), rollbacks=0, wait=True)
    keeper.save(state_of(2), rollbacks=0, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        keeper.save(state_of(3), rollbacks=0, wait=True)
    keeper.tell_finished()
    assert [event.kind for event in told] == ["save_failed", "saved", "save_failed"]
    assert "No space left on device; there is no checkpoint yet" in told[0].message
    assert "the newest checkpoint is still step-000000002" in told[2].message
    assert (told[2].level, keeper.newest, keeper.saved_step) == ("error", "step-000000002", 2)


def test_a_rollback_returns_to_the_newest_whole_good_one(keeper_of, told, tmp_path):
    root = tmp_path / CHECKPOINTS_DIRECTORY
    keeper = keeper_of()
    with pytest.raises(TrainingFailed, match="no good checkpoint to return to"):
        keeper.newest_good()
    write_checkpoint(root, 1)
    good = write_checkpoint(root, 2)
    damaged = write_checkpoint(root, 3)
    write_checkpoint(root, 4, good=False)
    (damaged / "rank-00000.safetensors").write_bytes(b"")
    found = keeper.newest_good()
    assert (found.path, found.manifest.state.step) == (good, 2)
    assert [(event.kind, "step-000000003" in event.message) for event in told] == [("damaged", True)]


def test_what_was_saved_comes_back(keeper_of, training):
    keeper = keeper_of()
    keeper.save(state_of(4), rollbacks=0)
    weight = next(training.module.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    good = keeper.newest_good()
    keeper.at_step = None
    keeper.restore(good.path, good.manifest)
    assert torch.equal(weight, before)
    assert (keeper.newest, keeper.at_step) == ("step-000000004", 4)
