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
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.format import (
    CHECKPOINTS_DIRECTORY,
    list_checkpoints,
    read_checkpoint,
    step_of,
)
from trainer.checkpoint.manager import CheckpointManager, state_bytes
from trainer.checkpoint.tensors import tensor_shards
from trainer.config.train_config import CheckpointSettings
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig, TrainingFailed

FILE = "rank-00000.safetensors"
LOWEST_PRIORITY = 19


@pytest.fixture
def training(dataset):
    return training_of(config_of(), dataset)


@pytest.fixture
def events():
    """Events that managers have reported."""
    return []


@pytest.fixture
def root(tmp_path):
    """Directory of the checkpoints of a manager."""
    return tmp_path / CHECKPOINTS_DIRECTORY


@pytest.fixture
def manager_of(training, tmp_path, events):
    """Return a function that makes managers with given settings."""

    def make(directory=tmp_path, **settings) -> CheckpointManager:
        config = config_of(checkpoint=CheckpointSettings(**settings))
        ranks = join_ranks(config, environment={})
        return CheckpointManager(
            directory, config, training, ranks, attempt=1, report_event=events.append
        )

    return make


@pytest.fixture
def clock(monkeypatch):
    """Clock of managers and their writers, which a test moves by its ``now_s``."""
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now_s
    for module in ("manager", "async_writer"):
        monkeypatch.setattr(f"trainer.checkpoint.{module}.time", clock)
    return clock


def save(manager, step, **changes):
    """Save a state, and wait until the save has succeeded or failed."""
    manager.save(state_of(step, **changes), rollbacks=0, wait=True)


@pytest.fixture
def fail_to_save(monkeypatch):
    """Return a function that saves to a disk which fails; it is full by default."""

    def save_on_bad_disk(manager, step, error_number=errno.ENOSPC):
        error = OSError(error_number, os.strerror(error_number))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Mock(side_effect=error))
            save(manager, step)

    return save_on_bad_disk


def steps_in(root):
    """Return the steps of all checkpoints, newest first."""
    return [step_of(path.name) for path in list_checkpoints(root)]


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


@pytest.mark.parametrize(
    ("settings", "due_steps"),
    [
        pytest.param({}, [], id="no interval"),
        pytest.param({"interval_steps": 3}, [3, 6, 9], id="one interval"),
        pytest.param(
            {"interval_steps": 3, "keep_every_steps": 4},
            [3, 4, 6, 8, 9],
            id="two intervals",
        ),
        pytest.param(
            {"interval_steps": 3, "keep_every_steps": 4, "enabled": False},
            [],
            id="disabled",
        ),
    ],
)
def test_save_is_due_at_multiples_of_its_intervals(manager_of, settings, due_steps):
    manager = manager_of(**settings)
    assert [step for step in range(1, 10) if manager.is_due(step, None)] == due_steps


def test_requested_save_is_due_once(manager_of):
    manager = manager_of()
    assert manager.is_due(5, requested_at=4)
    save(manager, 5)
    assert not manager.is_due(5, requested_at=4)
    assert not manager.is_due(6, requested_at=5)
    assert manager.is_due(7, requested_at=6)


def test_save_is_due_after_its_interval(manager_of, clock):
    manager = manager_of(interval_s=60.0)
    clock.now_s += 59
    assert not manager.is_due_by_time()
    clock.now_s += 1
    assert manager.is_due_by_time()
    save(manager, 5)
    assert not manager.is_due_by_time()
    clock.now_s += 60
    assert manager.is_due_by_time()


def test_disabled_save_is_never_due_by_time(manager_of, clock):
    manager = manager_of(interval_s=60.0, enabled=False)
    clock.now_s += 120
    assert not manager.is_due_by_time()


def test_duration_is_estimated_before_the_first_save(manager_of, training):
    # A second, and the bytes of the state at 100 MB/s.
    expected_s = 1 + state_bytes(training) / 100e6
    assert manager_of().expected_duration_s == pytest.approx(expected_s)


def test_duration_is_that_of_the_last_save(manager_of, events):
    manager = manager_of()
    for step in (1, 2):
        save(manager, step)
        assert manager.expected_duration_s == events[-1].values["seconds"]


@pytest.mark.parametrize(
    "has_saved_before",
    [
        pytest.param(False, id="estimated"),
        pytest.param(True, id="measured"),
    ],
)
def test_failed_save_leaves_the_expected_duration(
    manager_of, events, fail_to_save, has_saved_before
):
    manager = manager_of()
    if has_saved_before:
        save(manager, 1)
    duration_s = manager.expected_duration_s
    fail_to_save(manager, 2)
    assert events[-1].kind == "save_failed"
    assert manager.expected_duration_s == duration_s


def test_disabled_saves_take_no_time(manager_of):
    assert manager_of(enabled=False).expected_duration_s == 0


def test_state_has_three_values_per_trained_weight(training):
    parameters = list(training.module.parameters())
    weights = sum(parameter.numel() for parameter in parameters)
    bytes_per_value = 4
    assert state_bytes(training) == 3 * bytes_per_value * weights
    parameters[0].requires_grad_(False)
    frozen_weights = parameters[0].numel()
    values = 3 * (weights - frozen_weights) + frozen_weights
    assert state_bytes(training) == bytes_per_value * values


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


def test_rollback_needs_a_good_checkpoint(manager_of):
    with pytest.raises(TrainingFailed, match="no good checkpoint exists"):
        manager_of().newest_good()


def test_rollback_returns_to_the_newest_good_checkpoint(manager_of, events, root):
    write_checkpoint(root, 1)
    good = write_checkpoint(root, 2)
    corrupt = write_checkpoint(root, 3)
    write_checkpoint(root, 4, good=False)
    (corrupt / FILE).write_bytes(b"")
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
    saved = load_file(path / FILE)
    assert {name for name in saved if name.startswith("weights.")} == weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())


def test_background_save_stalls_for_its_copy_only(
    manager_of, root, events, delayed_write
):
    manager = manager_of()
    manager.save(state_of(3), rollbacks=0)
    delayed_write.set()
    manager.wait()
    (path,) = list_checkpoints(root)
    values = events[0].values
    assert values["size_bytes"] == (path / FILE).stat().st_size
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
    saved = load_file(newest / FILE)
    saved_before = load_file(older / FILE)
    for name, _ in training.module.named_parameters():
        assert bool((saved[f"weights.{name}"] == 2).all())
        assert not bool((saved_before[f"weights.{name}"] == 2).any())


@pytest.fixture(params=["synchronous", "waited for"])
def saved_manager(request, manager_of, monkeypatch):
    """A manager after a save that training has waited for."""
    is_synchronous = request.param == "synchronous"
    manager = manager_of(asynchronous=not is_synchronous)
    # The copy is allocated in the background, and the save allocates no other one.
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
