"""``autotune estimate``, with real traces of small models."""

import json
import subprocess
import sys

import pytest

from autotune.machine.gpu_models import RESERVE_BYTES

SMALL_MODEL = "--model bert-mini --seq-length 64 --max-micro-batch-size 8 --no-compile"
ONE_LAYER = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
LONGFORMER = {
    "model_type": "longformer",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "attention_window": [32, 32],
    "max_position_embeddings": 514,
}
"""An encoder that cannot be traced."""

pytestmark = pytest.mark.usefixtures("warm_server")


@pytest.fixture
def estimate(says):
    """Return a function that runs the command with options, and returns its text."""

    def run(options, code=0):
        return says("estimate", *options.split(), code=code)

    return run


@pytest.mark.system
def test_reports_reserve_of_default_budget(estimate):
    on_gpu = f"{SMALL_MODEL} --gpu h100-nvl-94gb"
    assert "NVIDIA H100 NVL (512 MiB of its memory stay free)" in estimate(on_gpu)
    assert "stay free" not in estimate(f"{on_gpu} --memory 94GB")


@pytest.mark.system
def test_probe_command_names_other_settings(estimate):
    text = estimate(f"{SMALL_MODEL} --memory 20GB --mlm-head dense")
    assert "at least 8" in text
    assert (
        "--memory 20GB --seq-length 64 --no-compile --max-micro-batch-size 8  #"
        " measures the sparse head" in text
    )


@pytest.mark.system
def test_breakdown_of_an_absent_gpu_adds_up(estimate):
    answer = json.loads(
        estimate("--model bert-120m --gpu h100-nvl-94gb --attention-dropout 0 --json")
    )
    (model,) = answer["models"]
    breakdown = model["breakdown"]
    assert sum(breakdown["terms_bytes"].values()) == breakdown["peak_bytes"]
    assert breakdown["peak_bytes"] <= model["budget_bytes"]
    # The GPU has 93 GiB as torch counts them.
    assert model["budget_bytes"] == 93 * 2**30 - RESERVE_BYTES
    assert 300 < model["micro_batch_size_low"] <= model["micro_batch_size"]
    assert model["micro_batch_size"] <= model["micro_batch_size_high"] < 660
    assert model["attention"] == "varlen"
    assert model["traces"] == 5
    assert model["parameters"] == pytest.approx(109.5e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.system
def test_what_if_prefers_full_checkpointing(estimate, tmp_path):
    model = tmp_path / "bert.json"
    model.write_text(json.dumps(ONE_LAYER))
    answer = json.loads(
        estimate(
            f"--model {model} --gpu a100-40gb --seq-length 64 --no-compile --what-if"
            " --json"
        )
    )
    sizes = {
        (
            setting["precision"],
            setting["attention"],
            setting["activation_checkpointing"],
            setting["mlm_head"],
        ): setting["micro_batch_size"]
        for setting in answer["what_if"]
        if setting["layout"] == "padded"
    }
    # Two precisions and two kinds of attention, which are three pairs as varlen needs
    # bf16; three kinds of checkpointing; two heads.
    assert len(sizes) == 3 * 3 * 2
    for precision, attention, _, head in sizes:
        full = sizes[precision, attention, "full", head]
        none = sizes[precision, attention, "none", head]
        # A small model saves little by it, and free blocks between others may cost
        # that.
        assert full >= 0.99 * none
        sparse = sizes[precision, attention, "none", "sparse"]
        assert sparse >= sizes[precision, attention, "none", "dense"]


@pytest.mark.system
def test_shares_shrink_with_the_zero_stage(estimate):
    answer = json.loads(
        estimate(
            "--model bert-mini --gpu l40s-48gb --seq-length 64 --ranks 8 --no-compile"
            " --json"
        )
    )
    (model,) = answer["models"]
    shares = {share["name"]: share["total_bytes"] for share in model["shares"]}
    assert shares["DDP"] == model["breakdown"]["peak_bytes"]
    assert shares["DDP"] > shares["ZeRO-1"]
    assert shares["ZeRO-1"] > shares["ZeRO-2"]
    assert shares["ZeRO-2"] > shares["ZeRO-3 (FSDP2)"]


@pytest.mark.slow
@pytest.mark.system
def test_rejected_models_do_not_affect_others(tmp_path):
    longformer = tmp_path / "longformer.json"
    longformer.write_text(json.dumps(LONGFORMER))
    # As a program of its own: both of its outputs are read.
    process = run_program(
        "estimate --json --memory 1800MB --seq-length 128 --no-compile"
        f" --model {longformer} --model bert-mini --model bert-120m"
    )
    assert process.returncode == 7
    assert "the memory of 'longformer' cannot be predicted" in process.stderr
    assert (
        f"autotune probe --model {longformer} --model bert-mini --data DIR --memory"
        " 1800MB --seq-length 128 --no-compile" in process.stderr
    )
    assert (
        "one sequence of 128 tokens of 'bert-120m' is predicted to exceed"
        in process.stderr
    )
    answer = json.loads(process.stdout)
    assert [model["model"] for model in answer["models"]] == ["bert-mini"]
    assert {name: error["exit_code"] for name, error in answer["rejected"].items()} == {
        "longformer": 7,
        "bert-120m": 4,
    }


def run_program(options):
    return subprocess.run(
        [sys.executable, "-m", "autotune", *options.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        pytest.param(
            "--model bert-120m --gpu h100-nvl-94", 3, "h100-nvl-94gb", id="unknown GPU"
        ),
        pytest.param(
            "--model bert-12m --memory 8GB", 3, "Did you mean", id="unknown model"
        ),
        pytest.param(
            "--model bert-120m --gpu h100-nvl-94gb --memory 94GiB",
            3,
            "exceeds the memory of NVIDIA H100 NVL: 93.6 GiB",
            id="more memory than the GPU has",
        ),
        pytest.param(
            "--model bert-120m --memory much", 2, "not a size", id="no size of memory"
        ),
        pytest.param(
            "--model bert-mini --device cpu",
            2,
            "--device cpu requires --memory",
            id="CPU without memory",
        ),
        pytest.param(
            "--model bert-120m --memory 1GB --no-compile",
            4,
            "one sequence of 512 tokens",
            id="too large a model",
        ),
        pytest.param(
            "--model bert-mini --memory 8GB --attention varlen --attention-dropout 0.1",
            3,
            "--attention-dropout 0, or use --attention sdpa",
            id="dropout that the attention kernel lacks",
        ),
        pytest.param(
            "--model bert-mini --memory 8GB --seq-length 1024",
            3,
            "512 positions",
            id="too long sequences",
        ),
    ],
)
def test_rejection_names_a_remedy(estimate, options, code, message):
    assert message in estimate(options, code=code)
