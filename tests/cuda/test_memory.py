"""Predictions of memory, and the allocator and kernels that they assume."""

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
    # Long documents, for which FlashAttention 4 computes both directions.
    Case(model="bert-mini", attention="fa4", documents=1.0),
)
PEAK_ERROR = {False: 0.001, True: 0.03}
"""By whether layers are compiled."""


@pytest.mark.usefixtures("cuda_environment")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predicts_the_largest_micro_batch(case):
    figures = on_pretended_gpus(case)
    error = PEAK_ERROR[case.compiled]
    assert figures["verified"], figures
    assert figures["predicted_peak_bytes"] == pytest.approx(
        figures["allocator_peak_bytes"], rel=error
    )
    assert figures["predicted_rows"] == pytest.approx(
        figures["largest_micro_batch_size"], rel=error
    )
    assert len(figures["trials"]) <= 6


JOIN_RANKS = """
import torch
from tests.trainer.tiny_models import config_of
from trainer.runtime.ranks import join_ranks
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
    ended = null_gpu(variables=variables).run("-c", JOIN_RANKS)
    assert ended.out == "True\n", ended


STEP_AND_EVALUATE = """
import sys
from pathlib import Path
import torch
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.data.dataset import TokenDataset
from trainer.runtime.ranks import join_ranks
from trainer.evaluate import evaluate
dataset = TokenDataset.open(Path(sys.argv[1]))
evaluation = {"max_sequences": 8}
config = config_of(
    device="cuda", precision="bf16", attention=sys.argv[2], evaluation=evaluation
)
training = training_of(config, dataset)
training.step.run(micro_batches(dataset, config), 1e-4)
evaluate(training.module, dataset, config, join_ranks(config, environment={}), 1)
torch.cuda.synchronize()
print("stepped", flush=True)
"""
LAYERS = 2


@pytest.mark.parametrize(
    ("attention", "launches"),
    [
        (
            "sdpa",
            {
                "fmha_cutlassF": 2 * LAYERS,
                "fmha_cutlassB": LAYERS,
                "flash_fwd": 0,
            },
        ),
        (
            "varlen",
            {"fmha_cutlassF": 0, "fmha_cutlassB": 0, "flash_fwd": 2 * LAYERS},
        ),
    ],
)
def test_attention_runs_the_predicted_kernels(
    null_gpu, patterned_dataset, attention, launches
):
    """Training and evaluation use the same kernels.

    On Hopper torch would choose cuDNN's kernels for both.
    """
    machine = null_gpu(name="h100-sxm-80gb")
    ended = machine.run("-c", STEP_AND_EVALUATE, patterned_dataset, attention)
    assert ended.out == "stepped\n", ended
    counts = ended.counts
    assert {name: counts.kernels(name) for name in launches} == launches, counts
    assert (counts.kernels("flash_bwd") > 0) == (attention == "varlen")
    of_cudnn = {
        name
        for name in (*counts.of("call"), *counts.of("kernel"))
        if "cudnn" in name.lower()
    }
    assert of_cudnn <= {"cudnnGetVersion", "cudnnGetProperty"}


REHEARSE = """
import sys
from pathlib import Path
import torch
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.data.dataset import TokenDataset
from trainer.runtime.ranks import join_ranks, warm_up_libraries
dataset = TokenDataset.open(Path(sys.argv[1]))
config = config_of(device="cuda", precision="bf16", attention="varlen")
warm_up_libraries(join_ranks(config, environment={}))
training = training_of(config, dataset)
make_optimizer_state(training)
before_bytes = torch.cuda.memory_allocated()
training.step.rehearse(micro_batches(dataset, config)[0])
torch.cuda.synchronize()
print(torch.cuda.memory_allocated() - before_bytes, flush=True)
"""
WORKSPACE_BYTES = 32 * 2**20


def test_workspaces_do_not_split_activation_memory(null_gpu, patterned_dataset):
    """Workspaces are taken before the model.

    Within a step they would lie between its activations, and stay there.
    """
    ended = null_gpu(name="h100-sxm-80gb").run("-c", REHEARSE, patterned_dataset)
    assert int(ended.out) < WORKSPACE_BYTES, ended
