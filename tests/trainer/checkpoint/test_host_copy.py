import torch
from safetensors.torch import load

from trainer.checkpoint.host_copy import HostCopy
from trainer.checkpoint.tensors import TensorShard


def test_tensors_of_all_dtypes_are_aligned():
    # In this order, tensors wider than a byte would not be aligned.
    values = [
        torch.ones(3, dtype=torch.uint8),
        torch.full((3, 1), 2.5),
        torch.tensor(7),
        torch.zeros(0, 4),
        torch.full((5,), 1.5, dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.full((1,), 9.0, dtype=torch.float64),
    ]
    shards = [
        TensorShard(
            name=str(number),
            local=value,
            shape=tuple(value.shape),
            begin=0,
            saved_here=True,
            shared=True,
        )
        for number, value in enumerate(values)
    ]
    copy = HostCopy(shards, "rank-00000.safetensors", pinned=False)
    copy.take(shards)
    tensors = load(bytes(copy.content))
    for number, value in enumerate(values):
        assert torch.equal(tensors[str(number)], value)
