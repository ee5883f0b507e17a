"""``autotune estimate``, with real traces of small models."""

import contextlib
import io
import json
import subprocess
import sys

import pytest

from autotune.cli import run
from autotune.machine.gpu_models import RESERVE_BYTES
from autotune.subjects.mlm.memory import prediction
from tests.autotune.conftest import Borrowed

SMALL_MODEL = "--model bert-mini --seq-length 64 --max-micro-batch-size 8 --no-compile"
ONE_LAYER = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
"""Config of a small model."""
LONGFORMER = {
    "model_type": "longformer",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "attention_window": [32, 32],
    "max_position_embeddings": 514,
}
"""Config of an encoder that cannot be traced."""
# Exit codes.
USAGE_ERROR = 2
BAD_INPUT = 3
EXCEEDS_MEMORY = 4
CANNOT_TRACE = 7
CHILD_TIMEOUT_S = 120
"""Time limit of a command in its own process, many times its usual time."""

pytestmark = pytest.mark.usefixtures("warm_server")


@pytest.fixture
def estimate(says):
    """Return a function that runs the command with options and returns what it prints.

    It checks the exit code. If a failure is expected, it returns the standard error.
    """

    def call_estimate(options, code=0):
        return says("estimate", *options.split(), code=code)

    return call_estimate


@pytest.fixture
def estimated_model(estimate):
    """Return a function that estimates one model and returns its part of the JSON."""

    def call_estimate(options):
        (model,) = json.loads(estimate(f"{options} --json"))["models"]
        return model

    return call_estimate


@pytest.fixture(scope="module")
def bert_on_an_h100(started_server):
    """Return the JSON of bert-120m, whose slow trace several tests share."""
    options = "--model bert-120m --gpu h100-nvl-94gb --attention-dropout 0 --json"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(
            prediction, "ForkServerMachine", lambda **_: Borrowed(started_server)
        )
        assert run(["estimate", *options.split()]) == 0
    (model,) = json.loads(printed.getvalue())["models"]
    return model


def run_program(options):
    """Run the command in its own process, and return its outputs and exit code."""
    return subprocess.run(
        [sys.executable, "-m", "autotune", *options.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_TIMEOUT_S,
    )


def write_config(path, config):
    """Write a model's config, and return its path."""
    path.write_text(json.dumps(config))
    return path


@pytest.mark.system
def test_reports_reserve_of_default_budget(estimate):
    on_gpu = f"{SMALL_MODEL} --gpu h100-nvl-94gb"
    assert "NVIDIA H100 NVL (512 MiB of its memory stay free)" in estimate(on_gpu)
    assert "stay free" not in estimate(f"{on_gpu} --memory 94GB")


@pytest.mark.system
def test_limited_size_is_reported_as_a_lower_bound(estimate):
    # Far more than 8 sequences fit into 20 GB.
    assert "at least 8" in estimate(f"{SMALL_MODEL} --memory 20GB")


@pytest.mark.system
def test_probe_command_names_other_settings(estimate):
    text = estimate(f"{SMALL_MODEL} --memory 20GB --mlm-head dense")
    assert (
        "--memory 20GB --seq-length 64 --no-compile --max-micro-batch-size 8  #"
        " measures the sparse head" in text
    )


@pytest.mark.system
def test_breakdown_of_an_absent_gpu_adds_up(bert_on_an_h100):
    breakdown = bert_on_an_h100["breakdown"]
    assert sum(breakdown["terms_bytes"].values()) == breakdown["peak_bytes"]
    assert breakdown["peak_bytes"] <= bert_on_an_h100["budget_bytes"]


@pytest.mark.system
def test_default_budget_leaves_a_reserve(bert_on_an_h100):
    # Torch reports 93 GiB on an H100 NVL.
    assert bert_on_an_h100["budget_bytes"] == 93 * 2**30 - RESERVE_BYTES


@pytest.mark.system
def test_micro_batch_of_absent_gpu_has_range(bert_on_an_h100):
    low = bert_on_an_h100["micro_batch_size_low"]
    high = bert_on_an_h100["micro_batch_size_high"]
    # docs/benchmarks.md has 544 to 591; other versions of torch keep more or less.
    assert 300 < low <= bert_on_an_h100["micro_batch_size"] <= high < 660


@pytest.mark.system
def test_traced_model_is_described(bert_on_an_h100):
    assert bert_on_an_h100["attention"] == "varlen"
    # Two sizes at first, two near the largest, and one after its correction.
    assert bert_on_an_h100["traces"] == 5
    # 12 layers of 7.1 M parameters, 23.8 M embeddings, and the head's 0.6 M.
    assert bert_on_an_h100["parameters"] == pytest.approx(109.5e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.system
def test_what_if_prefers_settings_that_save_memory(estimate, tmp_path):
    model = write_config(tmp_path / "bert.json", ONE_LAYER)
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
    # Two precisions and two kinds of attention are three pairs, as varlen needs bf16.
    pairs = 3
    checkpointings = 3
    heads = 2
    assert len(sizes) == pairs * checkpointings * heads
    for precision, attention, _, head in sizes:
        full = sizes[precision, attention, "full", head]
        none = sizes[precision, attention, "none", head]
        # A model of one layer saves little by checkpointing, and fragmentation may cost
        # as much: allow 1 %.
        assert full >= 0.99 * none
        sparse = sizes[precision, attention, "none", "sparse"]
        dense = sizes[precision, attention, "none", "dense"]
        assert sparse >= dense


@pytest.mark.system
def test_shares_shrink_with_the_zero_stage(estimated_model):
    model = estimated_model(
        "--model bert-mini --gpu l40s-48gb --seq-length 64 --ranks 8 --no-compile"
    )
    shares = {share["name"]: share["total_bytes"] for share in model["shares"]}
    assert shares["DDP"] == model["breakdown"]["peak_bytes"]
    assert shares["DDP"] > shares["ZeRO-1"]
    assert shares["ZeRO-1"] > shares["ZeRO-2"]
    assert shares["ZeRO-2"] > shares["ZeRO-3 (FSDP2)"]


@pytest.mark.slow
@pytest.mark.system
def test_rejected_models_do_not_affect_others(tmp_path):
    longformer = write_config(tmp_path / "longformer.json", LONGFORMER)
    # In its own process, as both of its outputs are read.
    process = run_program(
        "estimate --json --memory 1800MB --seq-length 128 --no-compile"
        f" --model {longformer} --model bert-mini --model bert-120m"
    )
    # The exit code is that of the first rejected model.
    assert process.returncode == CANNOT_TRACE
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
        "longformer": CANNOT_TRACE,
        "bert-120m": EXCEEDS_MEMORY,
    }


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        pytest.param(
            "--model bert-120m --gpu h100-nvl-94",
            BAD_INPUT,
            "h100-nvl-94gb",
            id="unknown GPU",
        ),
        pytest.param(
            "--model bert-12m --memory 8GB",
            BAD_INPUT,
            "Did you mean",
            id="unknown model",
        ),
        pytest.param(
            "--model bert-120m --gpu h100-nvl-94gb --memory 94GiB",
            BAD_INPUT,
            "exceeds the memory of NVIDIA H100 NVL: 93.6 GiB",
            id="more memory than the GPU has",
        ),
        pytest.param(
            "--model bert-120m --memory much",
            USAGE_ERROR,
            "not a size",
            id="no size of memory",
        ),
        pytest.param(
            "--model bert-mini --device cpu",
            USAGE_ERROR,
            "--device cpu requires --memory",
            id="CPU without memory",
        ),
        pytest.param(
            "--model bert-120m --memory 1GB --no-compile",
            EXCEEDS_MEMORY,
            "one sequence of 512 tokens",
            id="too large a model",
        ),
        pytest.param(
            "--model bert-mini --memory 8GB --attention varlen --attention-dropout 0.1",
            BAD_INPUT,
            "--attention-dropout 0, or use --attention sdpa",
            id="dropout that the attention kernel lacks",
        ),
        pytest.param(
            "--model bert-mini --memory 8GB --seq-length 1024",
            BAD_INPUT,
            "512 positions",
            id="too long sequences",
        ),
    ],
)
def test_rejection_names_a_remedy(estimate, options, code, message):
    assert message in estimate(options, code=code)
