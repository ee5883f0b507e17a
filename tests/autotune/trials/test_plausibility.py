"""No rate beyond a data sheet, and none of a pretended GPU, is kept."""

import dataclasses

import pytest

from autotune.errors import MachineLacks, Undecided
from autotune.trials.decide.plausibility import (
    SLACK,
    GpuRate,
    check_profile,
    check_rates,
    check_run,
    has_rate,
    least_flops_per_token,
    rates_of_trial,
)
from autotune.trials.outcomes import Measured
from autotune.trials.values import Trial
from testbed.examples.profiles import but, example_profile
from testbed.examples.tuning import example_profile as tuned_profile
from tests.autotune.advice.runs import run_of
from trainer.config.presets import model_settings
from trainer.config.train_config import TrainConfig

H100_NVL = "NVIDIA H100 NVL"
H100_NVL_BF16_FLOPS_PER_S = 835e12
PRETENDED_DRIVER = "0.0 (nullgpu)"
UNKNOWN_ARCHITECTURE = {"precision": "bf16"}
BERT = TrainConfig(
    model=model_settings("bert-120m"),
    precision="bf16",
    global_batch_size=32,
    micro_batch_size=4,
)
BERT_CONFIG = BERT.model_dump(mode="json")
# Of eleven layers, and of keys and values of the last.
BERT_FLOPS_PER_TOKEN = 6 * (11 * 7_077_888 + 2 * 768**2)
# The rate of 4 million tokens per second, in the tests of jobs.
BERT_FLOPS_PER_S = 4_000_000 * BERT_FLOPS_PER_TOKEN


@pytest.mark.parametrize(
    ("per_s", "kind", "message"),
    [
        (
            8.6e15,
            "bf16",
            (
                r"matmuls: 8,600 TFLOP/s in bf16 measured on NVIDIA H100 NVL exceeds"
                r" its peak of 835"
            ),
        ),
        (500e12, "tf32", "in tf32"),
    ],
)
def test_rejects_rate_beyond_the_data_sheet(per_s, kind, message):
    with pytest.raises(Undecided, match=message):
        check_rates(H100_NVL, [GpuRate(name="matmuls", per_s=per_s, kind=kind)])


def test_accepts_rate_within_the_slack():
    per_s = SLACK * H100_NVL_BF16_FLOPS_PER_S
    check_rates(H100_NVL, [GpuRate(name="matmuls", per_s=per_s)])


@pytest.mark.parametrize(
    "gpu_name", [None, "NVIDIA Unheard Of", "NVIDIA H100 NVL MIG 1g.12gb"]
)
def test_unknown_gpu_has_no_limit(gpu_name):
    matmuls = GpuRate(name="matmuls", per_s=1e18)
    messages = GpuRate(name="messages", per_s=1e18, kind="links")
    check_rates(gpu_name, [matmuls, messages])


def test_token_of_known_architecture_takes_its_layers():
    assert least_flops_per_token(BERT, None) == BERT_FLOPS_PER_TOKEN


def test_token_of_unknown_architecture_takes_twice_the_parameters():
    nystromformer = BERT.model.model_copy(
        update={"config": {"model_type": "nystromformer"}}
    )
    unknown = BERT.model_copy(update={"model": nystromformer})
    assert least_flops_per_token(unknown, 1000) == 2000
    assert least_flops_per_token(unknown, None) == 0
    assert least_flops_per_token(None, None) == 0


@pytest.mark.parametrize(
    "figures",
    [
        {"within": [[2**20, 1e-3], [10**9, 1e-4]]},
        {"between": [[1, 0.0]]},
        {"neighbours_bytes_per_s": [1e13]},
    ],
    ids=["within", "between", "neighbours"],
)
def test_rejects_messages_faster_than_the_links(figures):
    trial = Trial(job="links", measured={}, timeout_s=1.0)
    outcome = Measured(figures={"matmul_flops_per_s": [], **figures})
    with pytest.raises(
        Undecided,
        match=r"TB/s of links measured on NVIDIA H100 NVL exceeds its peak of 0.6:",
    ):
        check_rates(H100_NVL, rates_of_trial(trial, outcome))


def test_replayed_trial_has_no_rate():
    replayed = Trial(
        job="training",
        measured={"config": BERT_CONFIG, "replayed_step_s": 1e-3},
        timeout_s=1.0,
    )
    outcome = Measured(figures={"tokens_per_s": 4e9})
    assert list(rates_of_trial(replayed, outcome)) == []


@pytest.mark.parametrize(
    ("job", "config", "figures", "per_s"),
    [
        pytest.param(
            "step",
            BERT_CONFIG,
            {"step_s": [0.5], "padded_tokens_per_step": 2_000_000},
            BERT_FLOPS_PER_S,
            id="step, by its tokens",
        ),
        pytest.param(
            "training",
            BERT_CONFIG,
            {"tokens_per_s": 4e6},
            BERT_FLOPS_PER_S,
            id="training, by its tokens",
        ),
        pytest.param(
            "training",
            BERT_CONFIG,
            {"tokens_per_s": 4e6, "model_flops_per_s": 0.0},
            BERT_FLOPS_PER_S,
            id="training, counted FLOPs too few",
        ),
        pytest.param(
            "gradient_sync",
            BERT_CONFIG,
            {
                "step_s": [0.5],
                "tokens_per_step": 4e6,
                "micro_batch_size": 4,
                "gradient_accumulation_steps": 4,
            },
            BERT_FLOPS_PER_S,
            id="gradient sync, by its tokens",
        ),
        pytest.param(
            "step",
            UNKNOWN_ARCHITECTURE,
            {"model_flops_per_step": 2e15, "step_s": [0.9, 1.0, 1.1], "local_ranks": 2},
            1e15,
            id="step, by its FLOPs",
        ),
        pytest.param(
            "training",
            UNKNOWN_ARCHITECTURE,
            {"model_flops_per_s": 2e15, "local_ranks": 2},
            1e15,
            id="training, by its FLOPs",
        ),
        pytest.param(
            "links", {}, {"matmul_flops_per_s": [1e12, 1e15]}, 1e15, id="links"
        ),
    ],
)
def test_every_timed_job_is_checked_per_gpu(job, config, figures, per_s):
    trial = Trial(job=job, measured={"config": config}, timeout_s=1.0)
    outcome = Measured(figures=figures)
    *_, rate = rates_of_trial(trial, outcome)
    assert rate.per_s == pytest.approx(per_s)
    assert not has_rate(trial, outcome, gpu_name=H100_NVL, driver="580.1")
    with pytest.raises(Undecided, match="TFLOP/s in bf16"):
        check_rates(H100_NVL, [rate])
    check_rates("NVIDIA B200", [rate])


def pretended_profile(**evidence):
    """Return the example profile as measured on a pretended GPU."""
    return but(
        example_profile(),
        train={
            "model": model_settings("bert-120m"),
            "precision": "bf16",
            "device": "cuda",
        },
        fingerprint={
            "device": "cuda",
            "gpu_name": H100_NVL,
            "driver": PRETENDED_DRIVER,
        },
        evidence=evidence,
    )


def test_pretended_profile_may_have_sizes():
    probe = example_profile().evidence.probe.model_copy(update={"curve": []})
    check_profile(pretended_profile(probe=probe, workers=None))


def test_pretended_profile_must_have_no_rates():
    curve = example_profile().evidence.probe.curve
    sustained = example_profile().evidence.probe.model_copy(
        update={"curve": [], "sustained": curve[0]}
    )
    for evidence in ({}, {"probe": sustained, "workers": None}):
        with pytest.raises(
            MachineLacks, match=r"pretended NVIDIA H100 NVL \(driver 0.0 \(nullgpu\)\)"
        ):
            check_profile(pretended_profile(**evidence))


def test_pretended_gpu_knows_only_the_allocators_bytes():
    assert pretended_profile().fingerprint.bytes_known == "allocator"
    assert tuned_profile("d").fingerprint.bytes_known == "measured"


@pytest.mark.parametrize(
    ("part", "table", "impossible"),
    [
        (
            "workers",
            "rows",
            {"model_flops_per_s_per_rank": [], "padded_tokens_per_s": [1e15]},
        ),
        ("explore", "rows", {"tokens_per_s": 1e15}),
        ("network", "gradient_syncs", {"tokens_per_s": 1e15}),
        ("network", "scaling", {"tokens_per_s": 1e15}),
        ("network", "links", {"bytes_per_s": 1e13}),
        ("baseline", "rows", {"tokens_per_s": [1e15]}),
        ("probe", "curve", {"padded_tokens_per_s": 1e15}),
    ],
)
def test_rejects_impossible_rate_in_any_evidence(part, table, impossible):
    profile = tuned_profile("d")
    check_profile(profile)
    evidence = getattr(profile.evidence, part)
    first, *others = getattr(evidence, table)
    changed = evidence.model_copy(
        update={table: [first.model_copy(update=impossible), *others]}
    )
    with pytest.raises(Undecided, match="measured on NVIDIA H100 NVL"):
        check_profile(but(profile, evidence={part: changed}))


def run_on_h100(driver):
    return run_of(
        [400_000.0],
        device=H100_NVL,
        peak_flops_per_s=H100_NVL_BF16_FLOPS_PER_S,
        config=BERT,
        driver=driver,
    )


@pytest.mark.parametrize("driver", ["580.1", None])
def test_accepts_possible_run(driver):
    check_run(run_on_h100(driver))


def test_rejects_run_on_pretended_gpu():
    with pytest.raises(MachineLacks, match=r"the run r: .* pretended NVIDIA H100 NVL"):
        check_run(run_on_h100(PRETENDED_DRIVER))


@pytest.mark.parametrize(
    "impossible",
    [{"mfu": 1.2}, {"model_flops_per_s_per_rank": 1e15}, {"tokens_per_s": 8_000_000.0}],
)
def test_rejects_run_with_impossible_rate(impossible):
    run = run_on_h100("580.1")
    step = run.steps[0].model_copy(update=impossible)
    with pytest.raises(Undecided, match=r"the run r: .* measured on NVIDIA H100 NVL"):
        check_run(dataclasses.replace(run, steps=(step,)))
