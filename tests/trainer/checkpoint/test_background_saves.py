"""Saves that a thread writes while training continues, and saves that it waits for."""

import os
import threading

import pytest
import torch
from safetensors.torch import load_file

from testbed.examples.checkpoints import state_of
from tests.trainer.checkpoint.saves import SHARE, steps_in
from tests.trainer.tiny_models import config_of
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.stored_checkpoints import list_checkpoints, read_checkpoint
from trainer.checkpoint.tensors import tensor_shards
from trainer.runtime.ranks import join_ranks

LOWEST_PRIORITY = 19


@pytest.fixture
def delayed_write(monkeypatch):
    """Event until which all writing waits."""
    may_write = threading.Event()
    write = CheckpointWriter.write

    def wait_and_write(*arguments):
        assert may_write.wait(30)  # seconds, if the test fails to set it
        write(*arguments)

    monkeypatch.setattr(CheckpointWriter, "write", wait_and_write)
    return may_write


def test_finished_saves_become_events(manager_of, events):
    manager = manager_of(keep_last=1)
    for step in (1, 2):
        manager.save(state_of(step), rollbacks=0)
    assert manager.last_state_step == 2
    manager.wait()
    assert [event.kind for event in events] == ["saved", "saved"]
    assert events[1].message == "saved step-000000002; removed step-000000001"


def priority_of_this_thread():
    # On Linux, 0 is the calling thread.
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_only_the_writing_thread_has_low_priority(manager_of, monkeypatch):
    priorities_of_writing = []
    write = CheckpointWriter.write

    def note_priority_and_write(*arguments):
        priorities_of_writing.append(priority_of_this_thread())
        write(*arguments)

    monkeypatch.setattr(CheckpointWriter, "write", note_priority_and_write)
    manager = manager_of()
    own_priority = priority_of_this_thread()
    manager.save(state_of(1), rollbacks=0)
    manager.wait()
    assert priorities_of_writing == [LOWEST_PRIORITY]
    assert priority_of_this_thread() == own_priority


def test_save_holds_the_state_at_its_call(manager_of, training, root, delayed_write):
    manager = manager_of()
    weights = {
        f"weights.{name}": parameter.detach().clone()
        for name, parameter in training.module.named_parameters()
    }
    manager.save(state_of(3), rollbacks=0)
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.fill_(2.0)
    delayed_write.set()
    manager.wait()
    (path,) = list_checkpoints(root)
    assert read_checkpoint(path).state == state_of(3)
    saved = load_file(path / SHARE)
    saved_weights = {name for name in saved if name.startswith("weights.")}
    assert saved_weights == weights.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


def test_background_save_stalls_for_its_copy_only(
    manager_of, root, events, delayed_write
):
    manager = manager_of()
    manager.save(state_of(3), rollbacks=0)
    delayed_write.set()
    manager.wait()
    (path,) = list_checkpoints(root)
    values = events[0].values
    assert values["size_bytes"] == (path / SHARE).stat().st_size
    assert values["stall_s"] < values["seconds"]


def test_save_waits_for_the_one_before(
    manager_of, training, root, events, delayed_write
):
    manager = manager_of()
    manager.save(state_of(3), rollbacks=0)
    manager.report_finished()
    assert manager.busy
    assert (events, list_checkpoints(root)) == ([], [])
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.fill_(2.0)
    # The call below waits for the first save, which the timer lets write meanwhile.
    threading.Timer(0.2, delayed_write.set).start()
    manager.save(state_of(4), rollbacks=1, wait=True)
    assert not manager.busy
    newest, older = list_checkpoints(root)
    assert (newest.name, older.name) == ("step-000000004-rollback-1", "step-000000003")
    # Neither save has the weights of the other.
    saved = load_file(newest / SHARE)
    saved_before = load_file(older / SHARE)
    for name, _ in training.module.named_parameters():
        assert bool((saved[f"weights.{name}"] == 2).all())
        assert not bool((saved_before[f"weights.{name}"] == 2).any())


@pytest.fixture(params=["synchronous", "waited for"])
def saved_manager(request, manager_of, monkeypatch):
    """A manager after a save that training has waited for."""
    is_synchronous = request.param == "synchronous"
    manager = manager_of(asynchronous=not is_synchronous)
    # The copy is allocated in the background, and the save allocates no other one. A
    # manager has no function that waits for it.
    manager._writer.wait_for_allocation()
    monkeypatch.setattr("trainer.checkpoint.async_writer.HostCopy", None)
    manager.save(state_of(0), rollbacks=0, wait=not is_synchronous)
    return manager


@pytest.mark.usefixtures("saved_manager")
def test_synchronous_save_stalls_for_its_duration(events, root):
    assert events[0].values["stall_s"] == events[0].values["seconds"]
    assert steps_in(root) == [0]


@pytest.mark.usefixtures("saved_manager")
def test_save_before_the_first_step_has_optimizer_state(training, root):
    ranks = join_ranks(config_of(), environment={})
    names = {shard.name for shard in tensor_shards(training, ranks)}
    assert any(name.startswith("exp_avg_sq.") for name in names)
    (path,) = list_checkpoints(root)
    assert read_checkpoint(path).tensors.keys() == names
