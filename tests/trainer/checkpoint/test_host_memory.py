"""Host memory that is too small for a copy of the state, and other errors of it."""

from unittest.mock import Mock

import pytest
import torch

from testbed.examples.checkpoints import state_of
from tests.trainer.tiny_models import config_of, training_of
from trainer.checkpoint.host_copy import HostCopy
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.tensors import TensorShard
from trainer.runtime.ranks import join_ranks

FILE = "rank-00000.safetensors"


def shard_of(name, value):
    """Describe a tensor of which this rank holds all."""
    return TensorShard(
        name=name,
        local=value,
        shape=tuple(value.shape),
        begin=0,
        saved_here=True,
        shared=True,
    )


def test_too_little_host_memory_is_a_memory_error():
    # More than the address space of a process. A tensor on "meta" has no memory itself.
    value = torch.empty(2**50, dtype=torch.uint8, device="meta")
    with pytest.raises(MemoryError, match="can't allocate memory"):
        HostCopy([shard_of("large", value)], FILE, pinned=False)


def fail_to_allocate(monkeypatch, error):
    """Let torch fail to allocate memory."""
    monkeypatch.setattr(torch, "empty", Mock(side_effect=error))


def test_too_little_pinned_memory_is_a_memory_error(monkeypatch):
    # The message of the driver, which has other lines about its causes.
    error = torch.AcceleratorError("CUDA error: out of memory\nSearch for ...")
    fail_to_allocate(monkeypatch, error)
    with pytest.raises(MemoryError, match="CUDA error: out of memory"):
        HostCopy([shard_of("small", torch.ones(3))], FILE, pinned=True)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            torch.AcceleratorError("CUDA error: an illegal memory access"),
            id="fault of the GPU",
        ),
        pytest.param(
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            id="too little GPU memory",
        ),
    ],
)
def test_other_allocation_error_is_not_translated(monkeypatch, error):
    fail_to_allocate(monkeypatch, error)
    with pytest.raises(type(error)) as raised:
        HostCopy([shard_of("small", torch.ones(3))], FILE, pinned=True)
    assert raised.value is error


def test_other_error_of_the_copy_ends_training(dataset, tmp_path, monkeypatch):
    config = config_of()
    events = []
    manager = CheckpointManager(
        tmp_path,
        config,
        training_of(config, dataset),
        join_ranks(config, environment={}),
        attempt=1,
        report_event=events.append,
    )
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(HostCopy, "take", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        manager.save(state_of(1), rollbacks=0)
    manager.report_finished()
    assert events == []
