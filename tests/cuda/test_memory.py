"""The allocator and the kernels of attention that memory is predicted for, and the
memory that it then reserves."""

import pytest

from testbed.nullgpu.memory import Case, on_pretended_gpus

pytestmark = pytest.mark.cuda
TINY = {"model": "bert-mini", "gpu": "rtx-4090-24gb"}
CASES = (
    Case(**TINY),
    Case(**TINY, attention="sdpa", dropout=0.1, activation_checkpointing="full"),
    pytest.param(
        Case(**TINY, compiled=True, activation_checkpointing="full"),
        marks=pytest.mark.soak,
    ),  # each trial compiles
    pytest.param(Case(**TINY, ranks=2), marks=pytest.mark.soak),
    Case(**TINY, ranks=2, strategy="zero1", activation_checkpointing="selective"),
    Case(model="bert-120m", ranks=2, strategy="fsdp2"),
)
PEAK_ERROR = {False: 0.001, True: 0.03}
"""By whether layers are compiled."""


@pytest.mark.usefixtures("cuda_environment")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predicts_the_largest_micro_batch(case):
    found = on_pretended_gpus(case)
    assert found["verified"], found
    assert found["predicted_peak_bytes"] == pytest.approx(
        found["allocator_peak_bytes"], rel=PEAK_ERROR[case.compiled]
    )
    assert found["predicted_rows"] == pytest.approx(
        found["largest_micro_batch_size"], rel=PEAK_ERROR[case.compiled]
    )
    assert len(found["trials"]) <= 6


JOINED = """
import torch
from tests.trainer.oracles import config_of
from trainer.distributed.ranks import join_ranks
join_ranks(config_of(device="cuda"))
torch.zeros(1, device="cuda")
print(torch.cuda.memory_snapshot()[0]["is_expandable"])
"""


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {
            "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.9",
            "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        },
    ],
    ids=["nothing set", "both names set"],
)
def test_segments_are_expandable_once_ranks_joined(null_gpu, variables):
    ended = null_gpu(variables=variables).run("-c", JOINED)
    assert ended.out == "True\n", ended


STEP = """
import sys
from pathlib import Path
import torch
from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.data.dataset import TokenDataset
from trainer.distributed.ranks import join_ranks
from trainer.evaluate import evaluate
dataset = TokenDataset.open(Path(sys.argv[1]))
config = config_of(device="cuda", precision="bf16", attention=sys.argv[2], evaluation={"max_sequences": 8})
training = training_of(config, dataset)
training.step.run(micro_batches(dataset, config), 1e-4)
evaluate(training.module, dataset, config, join_ranks(config, environment={}), 1)
torch.cuda.synchronize()
print("stepped", flush=True)
"""
LAYERS = 2


@pytest.mark.parametrize(
    ("attention", "expected"),
    [("sdpa", (2 * LAYERS, LAYERS, 0)), ("varlen", (0, 0, 2 * LAYERS))],
)
def test_attention_runs_the_predicted_kernels(
    null_gpu, patterned_dataset, attention, expected
):
    """In training and in evaluation; on Hopper torch would choose cuDNN's kernels for
    both."""
    ended = null_gpu(name="h100-sxm-80gb").run("-c", STEP, patterned_dataset, attention)
    assert ended.out == "stepped\n", ended
    counts = ended.counts
    launched = tuple(
        counts.kernels(name) for name in ("fmha_cutlassF", "fmha_cutlassB", "flash_fwd")
    )
    assert launched == expected, counts
    assert (counts.kernels("flash_bwd") > 0) == (attention == "varlen")
    called = {
        name
        for name in (*counts.of("call"), *counts.of("kernel"))
        if "cudnn" in name.lower()
    }
    assert called <= {"cudnnGetVersion", "cudnnGetProperty"}


REHEARSED = """
import sys
from pathlib import Path
import torch
from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.checkpoint.tensors import make_state
from trainer.data.dataset import TokenDataset
from trainer.distributed.ranks import join_ranks, open_libraries
dataset = TokenDataset.open(Path(sys.argv[1]))
config = config_of(device="cuda", precision="bf16", attention="varlen")
open_libraries(join_ranks(config, environment={}))
training = training_of(config, dataset)
make_state(training)
before_bytes = torch.cuda.memory_allocated()
training.step.rehearse(micro_batches(dataset, config)[0])
torch.cuda.synchronize()
print(torch.cuda.memory_allocated() - before_bytes, flush=True)
"""
WORKSPACE_BYTES = 32 * 2**20


def test_workspaces_do_not_split_activation_memory(null_gpu, patterned_dataset):
    """They are taken before the model: within a step they would lie between its
    activations, and stay there."""
    ended = null_gpu(name="h100-sxm-80gb").run("-c", REHEARSED, patterned_dataset)
    assert int(ended.out) < WORKSPACE_BYTES, ended
