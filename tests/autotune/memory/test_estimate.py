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
}
BERT |= {"intermediate_size": 512}
LONGFORMER = {
    "model_type": "longformer",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LONGFORMER |= {
    "intermediate_size": 128,
    "attention_window": [32, 32],
    "max_position_embeddings": 514,
}


pytestmark = pytest.mark.usefixtures("warm_server")


@pytest.fixture
def estimate(says):
    return lambda *words, code=0: says("estimate", *words, code=code)


@pytest.mark.system
def test_what_is_left_free_of_a_gpu_is_said_unless_the_budget_is_given_and_what_the_probe_does_otherwise_too(
    estimate,
):
    words = (
        "--model",
        "bert-mini",
        "--seq-length",
        "64",
        "--max-micro-batch-size",
        "8",
        "--no-compile",
    )
    on_a_card = (*words, "--gpu", "h100-nvl-94gb")
    assert "NVIDIA H100 NVL (512 MiB of its memory stay free)" in estimate(*on_a_card)
    assert "stay free" not in estimate(*on_a_card, "--memory", "94GB")
    text = estimate(*words, "--memory", "20GB", "--mlm-head", "dense")
    assert "at least 8" in text
    assert (
        "--memory 20GB --seq-length 64 --no-compile --max-micro-batch-size 8  #"
        " measures the sparse head" in text
    )


@pytest.mark.system
def test_the_ledger_of_a_card_that_is_not_here_adds_up(estimate):
    found = json.loads(
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
    one = found["models"][0]
    assert (
        sum(one["breakdown"]["terms_bytes"].values())
        == one["breakdown"]["peak_bytes"]
        <= one["budget_bytes"]
    )
    assert one["budget_bytes"] == 93 * 2**30 - RESERVE_BYTES
    assert (
        300
        < one["micro_batch_size_low"]
        <= one["micro_batch_size"]
        <= one["micro_batch_size_high"]
        < 660
    )
    assert (one["attention"], one["traces"]) == ("varlen", 5)
    assert one["parameters"] == pytest.approx(109.5e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.system
def test_what_would_be_otherwise_is_a_table_and_full_checkpointing_fits_the_most(
    estimate, tmp_path
):
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
    rows = {
        (
            one["precision"],
            one["attention"],
            one["activation_checkpointing"],
            one["mlm_head"],
        ): one["micro_batch_size"]
        for one in json.loads(estimate(*words, "--what-if", "--json"))["what_if"]
        if one["layout"] == "padded"
    }
    assert len(rows) == 18
    for precision, attention, _, head in rows:
        # A small model saves little by it, and free blocks between others may cost
        # that.
        assert (
            rows[precision, attention, "full", head]
            >= 0.99 * rows[precision, attention, "none", head]
        )
        assert (
            rows[precision, attention, "none", "sparse"]
            >= rows[precision, attention, "none", "dense"]
        )


@pytest.mark.system
def test_shares_of_several_gpus_shrink_with_the_stage(estimate):
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
    found = json.loads(estimate(*words, "--json"))
    shares = {one["name"]: one["total_bytes"] for one in found["models"][0]["shares"]}
    assert shares["DDP"] == found["models"][0]["breakdown"]["peak_bytes"]
    assert (
        shares["DDP"] > shares["ZeRO-1"] > shares["ZeRO-2"] > shares["ZeRO-3 (FSDP2)"]
    )


@pytest.mark.slow
@pytest.mark.system
def test_models_that_have_no_answer_keep_no_other_from_its_own(tmp_path):
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
    done = subprocess.run(
        [*command, *models], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 7
    assert "the memory of 'longformer' cannot be predicted" in done.stderr
    probe = (
        f"autotune probe --model {longformer} --model bert-mini --data DIR --memory"
        " 1800MB --seq-length 128"
    )
    probe += " --no-compile"
    assert probe in done.stderr
    assert (
        "one sequence of 128 tokens of 'bert-120m' is predicted to exceed"
        in done.stderr
    )
    found = json.loads(done.stdout)
    assert [one["model"] for one in found["models"]] == ["bert-mini"]
    assert {name: one["exit_code"] for name, one in found["rejected"].items()} == {
        "longformer": 7,
        "bert-120m": 4,
    }


MINI = ["--model", "bert-mini"]
LARGE = ["--model", "bert-120m"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
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
def test_what_cannot_be_predicted_or_trained_is_refused_with_what_would_help(
    estimate, arguments, code, said
):
    assert said in estimate(*arguments, code=code)
