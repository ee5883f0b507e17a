"""What the trainer sets on a GPU before it trains: the allocator and the kernels of attention."""

import pytest

pytestmark = pytest.mark.cuda

JOINED = """
import torch
from tests.trainer.oracles import config_of
from trainer.parallel import join_ranks
join_ranks(config_of(device="cuda"))
torch.zeros(1, device="cuda")
print(torch.cuda.memory_snapshot()[0]["is_expandable"])
"""


@pytest.mark.parametrize(
    "variables",
    [{}, {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.9", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}],
    ids=["nothing set", "both names set"],
)
def test_segments_are_expandable_as_soon_as_ranks_have_joined(null_gpu, variables):
    ended = null_gpu(variables=variables).run("-c", JOINED)
    assert ended.out == "True\n", ended
