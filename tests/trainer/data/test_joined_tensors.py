"""Tensors in one buffer."""

import pickle

import pytest
import torch

from trainer.data.joined_tensors import JoinedTensors

# Three bytes of ids, so that the next tensor would not begin at a multiple of its size.
TENSORS = {
    "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "ids": torch.tensor([[1, 2**16 - 1], [3, 4], [5, 6]], dtype=torch.uint16),
    "none": torch.zeros(0, dtype=torch.int32),
    "labels": torch.tensor([-100, 2**40], dtype=torch.int64),
}


@pytest.fixture
def joined() -> JoinedTensors:
    return JoinedTensors.join(
        {name: tensor.numpy() for name, tensor in TENSORS.items()}
    )


@pytest.mark.parametrize("name", TENSORS)
class TestTensor:
    """Each tensor, of several types and shapes."""

    def test_keeps_values_type_and_shape(self, name, joined):
        assert joined[name].dtype == TENSORS[name].dtype
        assert torch.equal(joined[name], TENSORS[name])

    def test_survives_move(self, name, joined):
        moved = joined.moved(torch.Tensor.clone)
        joined.buffer.zero_()
        assert torch.equal(moved[name], TENSORS[name])

    def test_survives_pickling(self, name, joined):
        assert torch.equal(pickle.loads(pickle.dumps(joined))[name], TENSORS[name])

    def test_is_aligned_for_wide_loads(self, name, joined):
        offset_bytes = joined[name].storage_offset() * joined[name].element_size()
        assert offset_bytes % 16 == 0


def test_views_share_the_buffer(joined):
    joined["labels"][0] = 7
    assert int(joined["labels"][0]) == 7
