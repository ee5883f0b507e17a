import pytest
import torch
from safetensors.torch import load

from trainer.checkpoint.host_copy import HostCopy
from trainer.checkpoint.tensors import TensorShard
from trainer.formats.files import DISK_BLOCK_BYTES

# In this order, tensors of more than a byte per value would not be aligned.
VALUES = {
    "uint8": torch.ones(3, dtype=torch.uint8),
    "float32": torch.full((3, 1), 2.5),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.full((5,), 1.5, dtype=torch.bfloat16),
    "bool": torch.tensor([True]),
    "float64": torch.full((1,), 9.0, dtype=torch.float64),
}


@pytest.fixture
def copy():
    """A copy of the values in host memory."""
    shards = [
        TensorShard(
            name=name,
            local=value,
            shape=tuple(value.shape),
            begin=0,
            saved_here=True,
            shared=True,
        )
        for name, value in VALUES.items()
    ]
    copy = HostCopy(shards, "rank-00000.safetensors", pinned=False)
    copy.take(shards)
    return copy


def test_safetensors_reads_tensors_of_mixed_dtypes(copy):
    tensors = load(bytes(copy.content))
    assert tensors.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)


def test_memory_is_aligned_for_direct_io(copy):
    memory = torch.frombuffer(copy.content, dtype=torch.uint8)
    assert memory.data_ptr() % DISK_BLOCK_BYTES == 0
