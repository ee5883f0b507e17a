import errno
import os
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from testbed.examples.checkpoints import state_of, write_checkpoint
from tests.trainer.oracles import config_of, training_of
from trainer.checkpoint import format
from trainer.checkpoint.manager import CheckpointManager, state_bytes
from trainer.checkpoint.tensors import tensor_shards
from trainer.config.train_config import CheckpointSettings
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig, TrainingFailed


@pytest.fixture
def training(dataset):
    return training_of(config_of(), dataset)


@pytest.fixture
def told():
    return []


@pytest.fixture
def manager_of(training, tmp_path, told):
    def make(directory=tmp_path, **settings) -> CheckpointManager:
        config = config_of(checkpoint=CheckpointSettings(**settings))
        ranks = join_ranks(config, environment={})
        return CheckpointManager(
            directory, config, training, ranks, attempt=1, report_event=told.append
        )

    return make


def save(manager, step, **changes):
    manager.save(state_of(step, **changes), rollbacks=0, wait=True)


@pytest.fixture
def save_on_bad_disk(monkeypatch):
    """Save to a disk that fails in the given way, and wait for it."""

    def save_there(manager, step, number=errno.ENOSPC):
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "fsync", Mock(side_effect=OSError(number, os.strerror(number)))
            )
            save(manager, step)

    return save_there


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, []),
        ({"interval_steps": 3}, [3, 6, 9]),
        ({"interval_steps": 3, "keep_every_steps": 4}, [3, 4, 6, 8, 9]),
        ({"interval_steps": 3, "keep_every_steps": 4, "enabled": False}, []),
    ],
)
def test_a_save_is_due_after_every_so_many_steps_and_for_those_that_are_to_stay(
    manager_of, settings, due
):
    manager = manager_of(**settings)
    assert [step for step in range(1, 10) if manager.is_due(step, None)] == due


def test_a_save_is_due_when_the_first_rank_asks_unless_it_asked_before_the_last_save(
    manager_of,
):
    manager = manager_of()
    assert manager.is_due(5, asked_at=4)
    save(manager, 5)
    assert [manager.is_due(asked + 1, asked_at=asked) for asked in (4, 5, 6)] == [
        False,
        False,
        True,
    ]


def test_a_save_is_due_by_time_when_the_last_is_long_enough_ago(
    manager_of, monkeypatch
):
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr("trainer.checkpoint.manager.time", clock)
    manager = manager_of(interval_s=60.0)
    clock.now_s += 59
    assert not manager.is_due_by_time()
    clock.now_s += 1
    assert manager.is_due_by_time()
    save(manager, 5)
    assert not manager.is_due_by_time()
    disabled = manager_of(interval_s=60.0, enabled=False)
    clock.now_s += 60
    assert manager.is_due_by_time()
    assert not disabled.is_due_by_time()


def test_a_save_takes_as_long_as_the_last_one_that_did_not_fail_or_as_a_guess(
    manager_of, training, told, save_on_bad_disk
):
    assert manager_of(enabled=False).save_s == 0
    manager = manager_of()
    expected_s = 1 + state_bytes(training) / 100e6
    for step in (1, 3):
        assert manager.save_s == pytest.approx(expected_s)
        save_on_bad_disk(manager, step)
        assert told[-1].kind == "save_failed"
        assert manager.save_s == pytest.approx(expected_s)
        save(manager, step + 1)
        expected_s = told[-1].values["seconds"]


def test_the_state_is_weights_and_two_numbers_for_each_that_is_trained(training):
    weights = sum(one.numel() for one in training.module.parameters())
    assert state_bytes(training) == 3 * 4 * weights
    next(training.module.parameters()).requires_grad_(False)
    frozen = next(training.module.parameters()).numel()
    assert state_bytes(training) == 4 * (3 * weights - 2 * frozen)


def test_a_save_becomes_an_event_when_it_has_ended_and_only_its_thread_has_the_lowest_priority(
    manager_of, told
):
    manager, priority = manager_of(keep_last=1), os.getpriority(os.PRIO_PROCESS, 0)
    for step in (1, 2):
        manager.save(state_of(step), rollbacks=0)
    assert manager.at_step == 2
    manager.wait()
    assert [event.kind for event in told] == ["saved", "saved"]
    assert told[1].message == "saved step-000000002; removed step-000000001"
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority


@pytest.mark.parametrize(
    ("broken", "error", "why"),
    [
        (
            "os.fsync",
            OSError(errno.ENOSPC, "No space left on device"),
            "No space left on device",
        ),
        (
            "trainer.checkpoint.format.CheckpointWriter.write",
            BadConfig("the share of rank 1 is not a table", next_step=""),
            "BadConfig: the share of rank 1 is not a table",
        ),
        (
            "trainer.checkpoint.manager.HostCopy",
            MemoryError("cannot allocate 12 GiB\nand more"),
            "host memory is too small for a copy of the state: cannot allocate 12 GiB",
        ),
    ],
)
def test_a_save_that_fails_is_told_and_training_goes_on_to_the_next(
    manager_of, told, monkeypatch, broken, error, why
):
    with monkeypatch.context() as patch:
        patch.setattr(broken, Mock(side_effect=error))
        manager = manager_of()
        manager.save(state_of(1), rollbacks=0)
        manager.wait()
    assert not manager.has_saved(1)
    save(manager, 2)
    assert [(event.kind, event.level) for event in told] == [
        ("save_failed", "error"),
        ("saved", "info"),
    ]
    assert f"{why}; no checkpoint exists yet; training continues" in told[0].message
    assert manager.has_saved(2)


def test_a_rollback_returns_to_the_newest_whole_good_one(manager_of, told, tmp_path):
    root = tmp_path / format.CHECKPOINTS_DIRECTORY
    manager = manager_of()
    with pytest.raises(TrainingFailed, match="no good checkpoint exists"):
        manager.newest_good()
    write_checkpoint(root, 1)
    good = write_checkpoint(root, 2)
    corrupt = write_checkpoint(root, 3)
    write_checkpoint(root, 4, good=False)
    (corrupt / "rank-00000.safetensors").write_bytes(b"")
    path, manifest = manager.newest_good()
    assert (path, manifest.state.step) == (good, 2)
    assert [(event.kind, "step-000000003" in event.message) for event in told] == [
        ("corrupt", True)
    ]


def test_what_was_saved_comes_back_and_another_runs_checkpoint_is_not_the_newest_of_this_one(
    manager_of, training, tmp_path
):
    own, other = manager_of(tmp_path / "a"), manager_of(tmp_path / "b")
    own.save(state_of(4), rollbacks=0)
    weight = next(training.module.parameters())
    before = weight.detach().clone()
    good = own.newest_good()
    assert (own.owns(good[0]), other.owns(good[0])) == (True, False)
    for manager, newest in ((own, "step-000000004"), (other, None)):
        with torch.no_grad():
            weight.zero_()
        manager.at_step = None
        manager.restore(*good)
        assert torch.equal(weight, before)
        assert (manager.newest, manager.at_step, manager.has_saved(4)) == (
            newest,
            4,
            manager is own,
        )


@pytest.mark.parametrize(
    ("number", "left"),
    [(errno.ENOSPC, [4, 2]), (errno.EDQUOT, [4, 2]), (errno.EIO, [4, 3, 2, 1])],
)
def test_a_full_disk_costs_all_but_the_newest_and_the_newest_good_one_and_another_fault_costs_none(
    manager_of, told, tmp_path, save_on_bad_disk, number, left
):
    manager = manager_of(keep_last=5)
    for step in (1, 2, 3, 4):
        save(manager, step, good=step < 3)
    save_on_bad_disk(manager, 5, number)
    assert [
        format.step_of(path.name)
        for path in format.list_checkpoints(tmp_path / format.CHECKPOINTS_DIRECTORY)
    ] == left
    assert (told[-1].kind, manager.newest) == ("save_failed", "step-000000004")
    assert "the newest checkpoint is still step-000000004" in told[-1].message
    assert told[-1].message.endswith("; removed step-000000003, step-000000001") == (
        left == [4, 2]
    )


def test_a_save_after_which_older_ones_cannot_be_removed_counts_and_that_is_told(
    manager_of, told, monkeypatch
):
    manager = manager_of(keep_last=1)
    save(manager, 1)
    refuse = Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted"))
    monkeypatch.setattr("trainer.checkpoint.format.prune", refuse)
    save(manager, 2)
    assert [event.kind for event in told] == ["saved", "not_removed", "saved"]
    assert (told[1].level, "Operation not permitted" in told[1].message) == (
        "warning",
        True,
    )
    assert manager.newest == "step-000000002"


def test_a_save_holds_the_moment_of_the_call_while_training_goes_on_and_the_next_one_waits_for_it(
    manager_of, training, tmp_path, told, monkeypatch
):
    manager, root = manager_of(), tmp_path / format.CHECKPOINTS_DIRECTORY
    written, write = threading.Event(), format.CheckpointWriter.write
    monkeypatch.setattr(
        format.CheckpointWriter,
        "write",
        lambda *arguments: written.wait(30) and write(*arguments),
    )
    before = {
        name: value.detach().clone()
        for name, value in training.module.named_parameters()
    }
    manager.save(state_of(3), rollbacks=0)
    manager.report_finished()
    assert manager.busy
    assert (told, format.list_checkpoints(root)) == ([], [])
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.fill_(2.0)
    threading.Timer(0.2, written.set).start()
    manager.save(state_of(4), rollbacks=1, wait=True)
    assert not manager.busy
    newest, older = format.list_checkpoints(root)
    assert (newest.name, older.name) == ("step-000000004-rollback-1", "step-000000003")
    assert format.read_checkpoint(older).state == state_of(3)
    assert (
        told[0].values["size_bytes"]
        == (older / "rank-00000.safetensors").stat().st_size
    )
    assert told[0].values["stall_s"] < told[0].values["seconds"]
    first, second = (
        load_file(path / "rank-00000.safetensors") for path in (older, newest)
    )
    assert {name for name in first if name.startswith("weights.")} == {
        f"weights.{name}" for name in before
    }
    assert all(
        torch.equal(first[f"weights.{name}"], value) for name, value in before.items()
    )
    assert all(bool((second[f"weights.{name}"] == 2).all()) for name in before)


@pytest.mark.parametrize("options", [{"asynchronous": False}, {}])
def test_a_save_that_is_waited_for_has_ended_on_return_and_takes_the_room_that_was_taken_before(
    manager_of, training, tmp_path, told, monkeypatch, options
):
    manager = manager_of(**options)
    manager._room.join()
    monkeypatch.setattr("trainer.checkpoint.manager.HostCopy", None)
    manager.save(state_of(0), rollbacks=0, wait=not options)
    assert told[0].values["stall_s"] == told[0].values["seconds"]
    (path,) = format.list_checkpoints(tmp_path / format.CHECKPOINTS_DIRECTORY)
    # Before the first step it has the optimizer's state, too.
    names = {
        one.name
        for one in tensor_shards(training, join_ranks(config_of(), environment={}))
    }
    assert any(name.startswith("exp_avg_sq.") for name in names)
    assert format.read_checkpoint(path).tensors.keys() == names
