"""Rates that no GPU can reach, and all rates of a pretended GPU, are rejected."""

import dataclasses

import pytest

from autotune.errors import MachineLacks, Undecided
from autotune.machine.values import MeasuredGpu
from autotune.trials.decide.plausibility import (
    SLACK,
    GpuRate,
    check_rates,
    has_rate,
    least_flops_per_token,
    rates_of_trial,
)
from autotune.trials.decide.profile_rates import check_profile
from autotune.trials.decide.run_rates import check_run
from autotune.trials.outcomes import Measured
from autotune.trials.values import Trial
from testbed.examples.profiles import but, example_profile
from testbed.examples.tuning import example_profile as tuned_profile
from tests.autotune.advice.runs import run_of
from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig

H100_NVL = "NVIDIA H100 NVL"
H100_NVL_BF16_FLOPS_PER_S = 835e12
REAL_DRIVER = "580.1"
PRETENDED_DRIVER = "0.0 (nullgpu)"
UNKNOWN_ARCHITECTURE = {"precision": "bf16"}
"""Settings without a model, so that the FLOPs of a token are unknown."""
BERT = TrainConfig(
    model=model_settings("bert-120m"),
    precision="bf16",
    global_batch_size=32,
    micro_batch_size=4,
)
BERT_CONFIG = BERT.model_dump(mode="json")
HIDDEN_SIZE = 768
INTERMEDIATE_SIZE = 3072
# Query, key, value and output of attention, and both matrices of the MLP.
WEIGHTS_PER_LAYER = 4 * HIDDEN_SIZE**2 + 2 * HIDDEN_SIZE * INTERMEDIATE_SIZE
# Every token takes part in eleven layers, and in keys and values of the last. Each
# weight takes a multiplication and an addition, in forward and twice in backward.
BERT_FLOPS_PER_TOKEN = 6 * (11 * WEIGHTS_PER_LAYER + 2 * HIDDEN_SIZE**2)
BERT_TOKENS_PER_S = 4_000_000
BERT_FLOPS_PER_S = BERT_TOKENS_PER_S * BERT_FLOPS_PER_TOKEN


@pytest.mark.parametrize(
    ("per_s", "kind", "message"),
    [
        pytest.param(
            8.6e15,
            "bf16",
            r"matmuls: 8,600 TFLOP/s in bf16 measured on NVIDIA H100 NVL exceeds"
            r" its peak of 835",
            id="bf16",
        ),
        pytest.param(500e12, "tf32", "in tf32", id="tf32, which is slower"),
    ],
)
def test_rejects_rate_beyond_the_data_sheet(per_s, kind, message):
    with pytest.raises(Undecided, match=message):
        check_rates(H100_NVL, [GpuRate(name="matmuls", per_s=per_s, kind=kind)])


def test_accepts_rate_within_the_slack():
    per_s = SLACK * H100_NVL_BF16_FLOPS_PER_S
    check_rates(H100_NVL, [GpuRate(name="matmuls", per_s=per_s)])


@pytest.mark.parametrize(
    "gpu_name",
    [
        pytest.param(None, id="CPU"),
        pytest.param("NVIDIA Unheard Of", id="unknown name"),
        pytest.param("NVIDIA H100 NVL MIG 1g.12gb", id="slice of a known GPU"),
    ],
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
        # Bytes of each message, and its seconds: 1 GB/s and 10 TB/s.
        pytest.param({"within": [[2**20, 1e-3], [10**9, 1e-4]]}, id="within nodes"),
        pytest.param({"between": [[1, 0.0]]}, id="between nodes, in no time"),
        pytest.param({"neighbours_bytes_per_s": [1e13]}, id="between neighbours"),
    ],
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
        job="window",
        measured={"config": BERT_CONFIG, "replayed_step_s": 1e-3},
        timeout_s=1.0,
    )
    outcome = Measured(figures={"units_per_s": 4e9})
    assert list(rates_of_trial(replayed, outcome)) == []


@pytest.mark.parametrize(
    ("job", "config", "figures", "per_s"),
    [
        pytest.param(
            "step",
            BERT_CONFIG,
            {"step_s": [0.5], "units_per_step": BERT_TOKENS_PER_S / 2},
            BERT_FLOPS_PER_S,
            id="step, by its tokens",
        ),
        pytest.param(
            "window",
            BERT_CONFIG,
            {"units_per_s": BERT_TOKENS_PER_S},
            BERT_FLOPS_PER_S,
            id="window, by its tokens",
        ),
        pytest.param(
            "window",
            BERT_CONFIG,
            {"units_per_s": BERT_TOKENS_PER_S, "model_flops_per_s": 0.0},
            BERT_FLOPS_PER_S,
            id="window, counted FLOPs too few",
        ),
        pytest.param(
            "gradient_sync",
            BERT_CONFIG,
            {
                "step_s": [0.5],
                # Of two ranks: the global batch has 32 sequences, a rank 4 x 4.
                "tokens_per_step": BERT_TOKENS_PER_S,
                "micro_batch_size": 4,
                "gradient_accumulation_steps": 4,
            },
            BERT_FLOPS_PER_S,
            id="gradient sync, by its tokens",
        ),
        pytest.param(
            "step",
            UNKNOWN_ARCHITECTURE,
            # The median step takes a second.
            {"model_flops_per_step": 2e15, "step_s": [0.9, 1.0, 1.1], "local_ranks": 2},
            1e15,
            id="step, by its FLOPs",
        ),
        pytest.param(
            "window",
            UNKNOWN_ARCHITECTURE,
            {"model_flops_per_s": 2e15, "local_ranks": 2},
            1e15,
            id="window, by its FLOPs",
        ),
        pytest.param(
            "links", {}, {"matmul_flops_per_s": [1e12, 1e15]}, 1e15, id="links"
        ),
    ],
)
def test_rate_of_every_timed_job_is_per_gpu(job, config, figures, per_s):
    trial = Trial(job=job, measured={"config": config}, timeout_s=1.0)
    *_, rate = rates_of_trial(trial, Measured(figures=figures))
    assert rate.per_s == pytest.approx(per_s)
    # A rate that an H100 cannot reach, but a B200 can.
    with pytest.raises(Undecided, match="TFLOP/s in bf16"):
        check_rates(H100_NVL, [rate])
    check_rates("NVIDIA B200", [rate])


@pytest.mark.parametrize(
    ("gpu_name", "driver", "shown"),
    [
        pytest.param("NVIDIA B200", REAL_DRIVER, True, id="possible"),
        pytest.param(H100_NVL, REAL_DRIVER, False, id="impossible"),
        pytest.param("NVIDIA B200", PRETENDED_DRIVER, False, id="pretended GPU"),
    ],
)
def test_only_possible_rate_of_real_gpu_counts(gpu_name, driver, shown):
    trial = Trial(job="window", measured={"config": BERT_CONFIG}, timeout_s=1.0)
    outcome = Measured(figures={"units_per_s": BERT_TOKENS_PER_S})
    assert has_rate(trial, outcome, MeasuredGpu(name=gpu_name, driver=driver)) is shown


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


def probe_with_sustained_rate_only():
    """Return evidence of a probe with a sustained rate and no curve."""
    probe = example_profile().evidence.probe
    return probe.model_copy(update={"curve": [], "sustained": probe.curve[0]})


@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param({}, id="curve and workers"),
        pytest.param(
            {"probe": probe_with_sustained_rate_only(), "workers": None},
            id="sustained rate alone",
        ),
    ],
)
def test_pretended_profile_must_have_no_rates(evidence):
    with pytest.raises(
        MachineLacks, match=r"pretended NVIDIA H100 NVL \(driver 0.0 \(nullgpu\)\)"
    ):
        check_profile(pretended_profile(**evidence))


def test_pretended_gpu_knows_only_the_allocators_bytes():
    assert pretended_profile().fingerprint.bytes_known == "allocator"


def test_real_gpu_knows_all_bytes():
    assert tuned_profile("d").fingerprint.bytes_known == "measured"


IMPOSSIBLE_TOKENS_PER_S = 1e15
IMPOSSIBLE_BYTES_PER_S = 1e13


@pytest.mark.parametrize(
    ("part", "table", "impossible"),
    [
        pytest.param(
            "probe",
            "curve",
            {"units_per_s": IMPOSSIBLE_TOKENS_PER_S},
            id="probe",
        ),
        pytest.param(
            "workers",
            "rows",
            {
                "model_flops_per_s_per_rank": [],
                "units_per_s": [IMPOSSIBLE_TOKENS_PER_S],
            },
            id="workers",
        ),
        pytest.param(
            "explore", "rows", {"tokens_per_s": IMPOSSIBLE_TOKENS_PER_S}, id="explore"
        ),
        pytest.param(
            "network",
            "gradient_syncs",
            {"tokens_per_s": IMPOSSIBLE_TOKENS_PER_S},
            id="gradient synchronisation",
        ),
        pytest.param(
            "network",
            "scaling",
            {"tokens_per_s": IMPOSSIBLE_TOKENS_PER_S},
            id="scaling",
        ),
        pytest.param(
            "network", "links", {"bytes_per_s": IMPOSSIBLE_BYTES_PER_S}, id="links"
        ),
        pytest.param(
            "baseline",
            "rows",
            {"units_per_s": [IMPOSSIBLE_TOKENS_PER_S]},
            id="baseline",
        ),
    ],
)
def test_rejects_impossible_rate_in_any_evidence(part, table, impossible):
    profile = tuned_profile("d")
    check_profile(profile)  # only the change makes it impossible
    evidence = getattr(profile.evidence, part)
    first_row, *other_rows = getattr(evidence, table)
    impossible_row = first_row.model_copy(update=impossible)
    changed = evidence.model_copy(update={table: [impossible_row, *other_rows]})
    with pytest.raises(Undecided, match="measured on NVIDIA H100 NVL"):
        check_profile(but(profile, evidence={part: changed}))


def run_on_h100(driver):
    """Return a run of one step, at 400,000 tokens/s."""
    return run_of(
        [400_000.0],
        device=H100_NVL,
        peak_flops_per_s=H100_NVL_BF16_FLOPS_PER_S,
        config=BERT,
        driver=driver,
    )


@pytest.mark.parametrize(
    "driver",
    [pytest.param(REAL_DRIVER, id="known driver"), pytest.param(None, id="not known")],
)
def test_accepts_possible_run(driver):
    check_run(run_on_h100(driver))


def test_rejects_run_on_pretended_gpu():
    with pytest.raises(MachineLacks, match=r"the run r: .* pretended NVIDIA H100 NVL"):
        check_run(run_on_h100(PRETENDED_DRIVER))


@pytest.mark.parametrize(
    "impossible",
    [
        pytest.param({"mfu": 1.2}, id="MFU"),
        pytest.param({"model_flops_per_s_per_rank": 1e15}, id="FLOP/s"),
        pytest.param({"tokens_per_s": 8_000_000.0}, id="tokens/s"),
    ],
)
def test_rejects_run_with_impossible_rate(impossible):
    run = run_on_h100(REAL_DRIVER)
    step = run.steps[0].model_copy(update=impossible)
    with pytest.raises(Undecided, match=r"the run r: .* measured on NVIDIA H100 NVL"):
        check_run(dataclasses.replace(run, steps=(step,)))
