import errno
import os
import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.checkpoints import save, state_of
from tests.trainer.oracles import config_of, training_of
from trainer.checkpoint import CheckpointWriter, list_checkpoints, read_checkpoint
from trainer.config import CheckpointSettings
from trainer.dataset import TokenDataset
from trainer.keeper import Saver
from trainer.parallel import join_ranks
from trainer.snapshot import held_tensors

CONFIG = config_of()
RANKS = join_ranks(CONFIG, environment={})


@pytest.fixture
def training(patterned_dataset):
    return training_of(CONFIG, TokenDataset.open(patterned_dataset))


@pytest.fixture
def saver_of(training, tmp_path):
    return lambda **settings: Saver(tmp_path, CheckpointSettings(**settings), training, RANKS, attempt=1, timeout_s=5.0)


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that writes when it is told to."""
    written, plain = threading.Event(), CheckpointWriter.write

    def write(*arguments):
        assert written.wait(30)
        plain(*arguments)

    monkeypatch.setattr(CheckpointWriter, "write", write)
    return written


def test_a_save_holds_the_moment_of_the_call_and_training_does_not_wait_for_the_disk(
    saver_of, training, slow_disk, tmp_path
):
    saver = saver_of()
    before = {name: value.detach().clone() for name, value in training.module.named_parameters()}
    save(saver, state_of(3))
    assert saver.busy
    assert saver.take_finished() == []
    assert list_checkpoints(tmp_path) == []
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.add_(1.0)
    slow_disk.set()
    saver.wait()
    assert not saver.busy
    (saved,) = saver.take_finished()
    assert saver.take_finished() == []
    assert (saved.step, saved.name, saved.error) == (3, "step-000000003", None)
    (path,) = list_checkpoints(tmp_path)
    assert read_checkpoint(path).state == state_of(3)
    assert saved.size_bytes == (path / "rank-00000.safetensors").stat().st_size
    assert saved.stall_s < saved.seconds
    read = load_file(path / "rank-00000.safetensors")
    assert all(torch.equal(read[f"weights.{name}"], value) for name, value in before.items())


def test_the_next_save_waits_for_the_one_before_and_takes_the_newer_state(saver_of, training, slow_disk, tmp_path):
    saver = saver_of()
    save(saver, state_of(1))
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.fill_(2.0)
    threading.Timer(0.2, slow_disk.set).start()
    save(saver, state_of(2), rollbacks=1, wait=True)
    assert [saved.name for saved in saver.take_finished()] == ["step-000000001", "step-000000002-rollback-1"]
    newest, older = list_checkpoints(tmp_path)
    read = [load_file(path / "rank-00000.safetensors") for path in (newest, older)]
    assert all(bool((value == 2).all()) for name, value in read[0].items() if name.startswith("weights."))
    assert not all(bool((value == 2).all()) for name, value in read[1].items() if name.startswith("weights."))


def test_a_save_that_is_waited_for_has_ended_on_return(saver_of, tmp_path):
    saver = saver_of()
    save(saver, state_of(1), wait=True)
    (saved,) = saver.take_finished()
    assert saved.stall_s == saved.seconds
    assert len(list_checkpoints(tmp_path)) == 1


def test_a_full_disk_is_told_and_later_saves_work(saver_of, tmp_path, monkeypatch):
    saver = saver_of()
    save(saver, state_of(1), wait=True)

    def full(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        save(saver, state_of(2), wait=True)
    save(saver, state_of(3), wait=True)
    assert [saved.error for saved in saver.take_finished()] == [None, "Disk quota exceeded", None]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000003", "step-000000001"]


def test_old_ones_are_removed_after_a_save_and_named(saver_of, tmp_path):
    saver = saver_of(keep_last=1)
    for step in (1, 2):
        save(saver, state_of(step), wait=True)
    assert [list(saved.removed) for saved in saver.take_finished()] == [[], ["step-000000001"]]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000002"]


def test_a_save_before_the_first_step_has_the_optimizers_state_too(saver_of, training, tmp_path):
    save(saver_of(), state_of(0), wait=True)
    (path,) = list_checkpoints(tmp_path)
    names = {one.name for one in held_tensors(training, RANKS)}
    assert any(name.startswith("exp_avg_sq.") for name in names)
    assert read_checkpoint(path).tensors.keys() == names


def test_room_that_was_taken_before_is_used_and_a_failure_to_take_it_is_left_for_the_save(
    saver_of, tmp_path, monkeypatch
):
    def no_room(*_, **__):
        raise MemoryError

    saver = saver_of()
    with monkeypatch.context() as patch:
        patch.setattr("trainer.keeper.HostCopy", no_room)
        saver.prepare()
        saver._room.join()
    for step in (1, 2):
        save(saver, state_of(step), wait=True)
    ready = saver_of()
    ready.prepare()
    monkeypatch.setattr("trainer.keeper.HostCopy", None)
    save(ready, state_of(3), wait=True)
    files = [path / "rank-00000.safetensors" for path in list_checkpoints(tmp_path)]
    assert [path.parent.name for path in files] == ["step-000000003", "step-000000002"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_only_the_writing_thread_is_given_the_lowest_priority(saver_of):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    saver = saver_of()
    save(saver, state_of(1))
    saver.wait()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
