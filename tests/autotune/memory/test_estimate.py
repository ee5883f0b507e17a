import json
import subprocess
import sys

import pytest

from autotune.machine.gpu_models import RESERVE_BYTES

BERT = {
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


SMALL_MODEL = (
    "--model",
    "bert-mini",
    "--seq-length",
    "64",
    "--max-micro-batch-size",
    "8",
    "--no-compile",
)

pytestmark = pytest.mark.usefixtures("warm_server")


@pytest.fixture
def estimate(says):
    return lambda *words, code=0: says("estimate", *words, code=code)


@pytest.mark.system
def test_reports_reserve_of_default_budget(
    estimate,
):
    on_gpu = (*SMALL_MODEL, "--gpu", "h100-nvl-94gb")
    assert "NVIDIA H100 NVL (512 MiB of its memory stay free)" in estimate(*on_gpu)
    assert "stay free" not in estimate(*on_gpu, "--memory", "94GB")


@pytest.mark.system
def test_probe_command_names_other_settings(estimate):
    text = estimate(*SMALL_MODEL, "--memory", "20GB", "--mlm-head", "dense")
    assert "at least 8" in text
    assert (
        "--memory 20GB --seq-length 64 --no-compile --max-micro-batch-size 8  #"
        " measures the sparse head" in text
    )


@pytest.mark.system
def test_breakdown_of_an_absent_gpu_adds_up(estimate):
    answer = json.loads(
        estimate(
            "--model",
            "bert-120m",
            "--gpu",
            "h100-nvl-94gb",
            "--attention-dropout",
            "0",
            "--json",
        )
    )
    model = answer["models"][0]
    breakdown = model["breakdown"]
    assert sum(breakdown["terms_bytes"].values()) == breakdown["peak_bytes"]
    assert breakdown["peak_bytes"] <= model["budget_bytes"]
    assert model["budget_bytes"] == 93 * 2**30 - RESERVE_BYTES
    assert (
        300
        < model["micro_batch_size_low"]
        <= model["micro_batch_size"]
        <= model["micro_batch_size_high"]
        < 660
    )
    assert (model["attention"], model["traces"]) == ("varlen", 5)
    assert model["parameters"] == pytest.approx(109.5e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.system
def test_what_if_prefers_full_checkpointing(estimate, tmp_path):
    model = tmp_path / "bert.json"
    model.write_text(json.dumps(BERT))
    words = (
        "--model",
        model,
        "--gpu",
        "a100-40gb",
        "--seq-length",
        "64",
        "--no-compile",
    )
    answer = json.loads(estimate(*words, "--what-if", "--json"))
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
    assert len(sizes) == 18
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
    words = (
        "--model",
        "bert-mini",
        "--gpu",
        "l40s-48gb",
        "--seq-length",
        "64",
        "--ranks",
        "8",
        "--no-compile",
    )
    answer = json.loads(estimate(*words, "--json"))
    shares = {
        share["name"]: share["total_bytes"] for share in answer["models"][0]["shares"]
    }
    assert shares["DDP"] == answer["models"][0]["breakdown"]["peak_bytes"]
    assert (
        shares["DDP"] > shares["ZeRO-1"] > shares["ZeRO-2"] > shares["ZeRO-3 (FSDP2)"]
    )


@pytest.mark.slow
@pytest.mark.system
def test_rejected_models_do_not_affect_others(tmp_path):
    longformer = tmp_path / "longformer.json"
    longformer.write_text(json.dumps(LONGFORMER))
    command = [
        sys.executable,
        "-m",
        "autotune",
        "estimate",
        "--json",
        "--memory",
        "1800MB",
        "--seq-length",
        "128",
    ]
    command = [*command, "--no-compile"]
    models = [
        "--model",
        str(longformer),
        "--model",
        "bert-mini",
        "--model",
        "bert-120m",
    ]
    process = subprocess.run(
        [*command, *models], capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == 7
    assert "the memory of 'longformer' cannot be predicted" in process.stderr
    probe = (
        f"autotune probe --model {longformer} --model bert-mini --data DIR --memory"
        " 1800MB --seq-length 128"
    )
    probe += " --no-compile"
    assert probe in process.stderr
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


MINI = ["--model", "bert-mini"]
LARGE = ["--model", "bert-120m"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([*LARGE, "--gpu", "h100-nvl-94"], 3, "h100-nvl-94gb"),
        (
            [*LARGE, "--gpu", "h100-nvl-94gb", "--memory", "94GiB"],
            3,
            "exceeds the memory of NVIDIA H100 NVL: 93.6 GiB",
        ),
        ([*LARGE, "--memory", "much"], 2, "not a size"),
        (["--model", "bert-12m", "--memory", "8GB"], 3, "Did you mean"),
        ([*MINI, "--device", "cpu"], 2, "--device cpu requires --memory"),
        ([*LARGE, "--memory", "1GB", "--no-compile"], 4, "one sequence of 512 tokens"),
        (
            [
                *MINI,
                "--memory",
                "8GB",
                "--attention",
                "varlen",
                "--attention-dropout",
                "0.1",
            ],
            3,
            "--attention-dropout 0, or use --attention sdpa",
        ),
        ([*MINI, "--memory", "8GB", "--seq-length", "1024"], 3, "512 positions"),
    ],
)
def test_rejection_names_a_remedy(estimate, arguments, code, message):
    assert message in estimate(*arguments, code=code)
