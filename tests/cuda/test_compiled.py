"""Layers that are compiled for a GPU, down to machine code: which, and how often.

Nothing is computed.
"""

import json

import pytest

from testbed.nullgpu.environment import ROOT
from testbed.programs import TORCHAO

pytestmark = pytest.mark.cuda
JOB = ROOT / "tests/cuda/compile_job.py"
# BERT: a layer, the last one, which computes predicted tokens only, loss and gradient;
# ModernBERT: two kinds of layer.
GRAPHS = {"bert": 4, "roberta": 4, "modernbert": 5}
QUICK = ("bert=4", "modernbert=6")
MORE = (
    # First, in fresh memory: torch draws its weights again until all are in range, and
    # here no kernel changes them.
    "modernbert=6,activation_checkpointing=selective",
    "bert=8",
    "roberta=4,activation_checkpointing=full",
    "bert=4,attention=sdpa,layout=padded",
)
FUSED = (
    "bert=4,fused_norms=true",
    "bert=4,fused_norms=true,gelu_epilogues=true",
)
FLOAT8 = ("bert=4,float8=tensorwise",)
SHARED = (
    "bert=4,strategy=ddp",
    "bert=4,strategy=ddp,fused_norms=true",
    "bert=4,strategy=zero1",
    "bert=4,strategy=fsdp2",
    "modernbert=6,strategy=fsdp2",
)


@pytest.mark.parametrize(
    ("cases", "devices"),
    [
        (QUICK, 1),
        (FUSED, 1),
        pytest.param(FLOAT8, 1, marks=pytest.mark.soak),
        pytest.param(MORE, 1, marks=pytest.mark.soak),
        pytest.param(SHARED, 2, marks=pytest.mark.soak),
    ],
)
def test_layers_of_a_kind_share_one_graph(null_gpu, patterned_dataset, cases, devices):
    variables = {"PYTHONPATH": f"{ROOT}:{TORCHAO}"} if cases == FLOAT8 else {}
    machine = null_gpu(devices=devices, variables=variables)
    ended = machine.torchrun(JOB, patterned_dataset, *cases, timeout_s=1200)
    figures_by_case = [
        json.loads(line) for line in ended.out.splitlines() if line.startswith("{")
    ]
    assert [figures["case"] for figures in figures_by_case] == list(cases), ended
    for figures in figures_by_case:
        family, _, _ = figures["case"].partition("=")
        assert figures["graphs"] == GRAPHS[family], figures_by_case
        assert figures["recompilations"] == 0, figures_by_case
        assert figures["triton_launches"] > 0, figures_by_case
        assert figures["triton_calls"] > 0, figures_by_case
        share = figures["triton_calls_with_bytes"] / figures["triton_calls"]
        assert share == 1, figures_by_case


def test_next_process_compiles_nothing_again(null_gpu, patterned_dataset, tmp_path):
    # Trials of one size are processes that share the compiler's cache on disk.
    machine = null_gpu(variables={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    misses = []
    for _ in range(2):
        ended = machine.torchrun(JOB, patterned_dataset, "bert=2", timeout_s=600)
        (line,) = [line for line in ended.out.splitlines() if line.startswith("{")]
        misses.append(json.loads(line)["cache_misses"])
    assert misses[0] > 0
    assert misses[1] == 0
