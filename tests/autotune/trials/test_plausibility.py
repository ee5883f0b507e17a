"""No rate beyond a data sheet, and none of a pretended GPU, is kept."""

import dataclasses

import pytest

from autotune.errors import MachineLacks, Undecided
from autotune.trials.decide import plausibility
from autotune.trials.decide.plausibility import (
    GpuRate,
    check_profile,
    check_rates,
    check_run,
    has_rate,
    rates_of_trial,
)
from autotune.trials.values import Measured, Trial
from testbed.examples.profiles import but, example_profile
from testbed.examples.tuning import example_profile as tuned_profile
from tests.autotune.advice.runs import run_of
from trainer.config.presets import model_settings
from trainer.config.train_config import TrainConfig

NVL = "NVIDIA H100 NVL"
NULL = "0.0 (nullgpu)"
CONFIG = {"precision": "bf16"}


@pytest.mark.parametrize(
    ("per_s", "of", "words"),
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
def test_a_rate_beyond_the_data_sheet_is_rejected_with_gpu_rate_and_limit(
    per_s, of, words
):
    check_rates(NVL, [GpuRate(what="matmuls", per_s=plausibility.SLACK * 835e12)])
    for unknown in (None, "NVIDIA Unheard Of", "NVIDIA H100 NVL MIG 1g.12gb"):
        check_rates(
            unknown,
            [
                GpuRate(what="matmuls", per_s=1e18),
                GpuRate(what="messages", per_s=1e18, of="links"),
            ],
        )
    with pytest.raises(Undecided, match=words):
        check_rates(NVL, [GpuRate(what="matmuls", per_s=per_s, of=of)])


BERT = TrainConfig(
    model=model_settings("bert-120m"),
    precision="bf16",
    global_batch_size=32,
    micro_batch_size=4,
)
BERT_CONFIG = BERT.model_dump(mode="json")
# Of eleven layers, and of keys and values of the last.
FLOPS = 6 * (11 * 7_077_888 + 2 * 768**2)


def test_a_token_of_a_known_architecture_takes_its_layers_and_of_any_other_twice_its_parameters():
    least_flops_per_token = plausibility.least_flops_per_token
    assert least_flops_per_token(BERT, None) == FLOPS
    other = BERT.model_copy(
        update={
            "model": BERT.model.model_copy(
                update={"config": {"model_type": "nystromformer"}}
            )
        }
    )
    assert least_flops_per_token(other, 1000) == 2000
    assert least_flops_per_token(other, None) == least_flops_per_token(None, None) == 0


@pytest.mark.parametrize(
    "figures",
    [
        {"within": [[2**20, 1e-3], [10**9, 1e-4]]},
        {"between": [[1, 0.0]]},
        {"neighbours_bytes_per_s": [1e13]},
    ],
)
def test_messages_faster_than_the_links_are_rejected_and_a_trial_that_was_replayed_has_no_rate(
    figures,
):
    replayed = Trial(
        job="training",
        measured={"config": BERT_CONFIG, "replayed_step_s": 1e-3},
        timeout_s=1.0,
    )
    assert list(rates_of_trial(replayed, Measured(figures={"tokens_per_s": 4e9}))) == []
    links = Trial(job="links", measured={}, timeout_s=1.0)
    with pytest.raises(
        Undecided,
        match=r"TB/s of links measured on NVIDIA H100 NVL exceeds its peak of 0.6:",
    ):
        check_rates(
            NVL,
            rates_of_trial(
                links, Measured(figures={"matmul_flops_per_s": [], **figures})
            ),
        )


OF_TOKENS = 4_000_000 * FLOPS


@pytest.mark.parametrize(
    ("job", "config", "figures", "per_s"),
    [
        (
            "step",
            BERT_CONFIG,
            {"step_s": [0.5], "padded_tokens_per_step": 2_000_000},
            OF_TOKENS,
        ),
        ("training", BERT_CONFIG, {"tokens_per_s": 4e6}, OF_TOKENS),
        (
            "training",
            BERT_CONFIG,
            {"tokens_per_s": 4e6, "model_flops_per_s": 0.0},
            OF_TOKENS,
        ),
        (
            "gradient_sync",
            BERT_CONFIG,
            {
                "step_s": [0.5],
                "tokens_per_step": 4e6,
                "micro_batch_size": 4,
                "gradient_accumulation_steps": 4,
            },
            OF_TOKENS,
        ),
        (
            "step",
            CONFIG,
            {"model_flops_per_step": 2e15, "step_s": [0.9, 1.0, 1.1], "local_ranks": 2},
            1e15,
        ),
        ("training", CONFIG, {"model_flops_per_s": 2e15, "local_ranks": 2}, 1e15),
        ("links", {}, {"matmul_flops_per_s": [1e12, 1e15]}, 1e15),
    ],
)
def test_every_job_that_measures_a_rate_is_checked_per_gpu_by_its_flops_and_its_tokens(
    job, config, figures, per_s
):
    trial, outcome = (
        Trial(job=job, measured={"config": config}, timeout_s=1.0),
        Measured(figures=figures),
    )
    *_, rate = rates_of_trial(trial, outcome)
    assert rate.per_s == pytest.approx(per_s)
    assert not has_rate(trial, outcome, gpu_name=NVL, driver="580.1")
    with pytest.raises(Undecided, match="TFLOP/s in bf16"):
        check_rates(NVL, [rate])
    check_rates("NVIDIA B200", [rate])


def pretended(**evidence):
    return but(
        example_profile(),
        train={
            "model": model_settings("bert-120m"),
            "precision": "bf16",
            "device": "cuda",
        },
        fingerprint={"device": "cuda", "gpu_name": NVL, "driver": NULL},
        evidence=evidence,
    )


def test_a_profile_of_a_pretended_gpu_keeps_sizes_and_no_rates():
    probe = example_profile().evidence.probe.model_copy(update={"curve": []})
    check_profile(pretended(probe=probe, workers=None))
    sustained = probe.model_copy(
        update={"sustained": example_profile().evidence.probe.curve[0]}
    )
    for kept in ({}, {"probe": sustained, "workers": None}):
        with pytest.raises(
            MachineLacks, match=r"pretended NVIDIA H100 NVL \(driver 0.0 \(nullgpu\)\)"
        ):
            check_profile(pretended(**kept))
    assert pretended().fingerprint.bytes_known == "allocator"
    assert tuned_profile("d").fingerprint.bytes_known == "measured"


@pytest.mark.parametrize(
    ("part", "rows", "changes"),
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
def test_a_profile_keeps_no_impossible_rate_in_any_part(part, rows, changes):
    profile = tuned_profile("d")
    check_profile(profile)
    found = getattr(profile.evidence, part)
    first, *others = getattr(found, rows)
    changed = found.model_copy(
        update={rows: [first.model_copy(update=changes), *others]}
    )
    with pytest.raises(Undecided, match="measured on NVIDIA H100 NVL"):
        check_profile(but(profile, evidence={part: changed}))


@pytest.mark.parametrize(
    "changes",
    [{"mfu": 1.2}, {"model_flops_per_s_per_rank": 1e15}, {"tokens_per_s": 8_000_000.0}],
)
def test_a_run_of_a_pretended_gpu_or_whose_rates_are_beyond_its_gpu_is_rejected(
    changes,
):
    header = {"device": NVL, "peak_flops_per_s": 835e12, "config": BERT}
    run, unknown, pretended = (
        run_of([400_000.0], **header, driver=driver) for driver in ("580.1", None, NULL)
    )
    check_run(run)
    check_run(unknown)
    with pytest.raises(MachineLacks, match=r"the run r: .* pretended NVIDIA H100 NVL"):
        check_run(pretended)
    with pytest.raises(Undecided, match=r"the run r: .* measured on NVIDIA H100 NVL"):
        check_run(
            dataclasses.replace(run, steps=(run.steps[0].model_copy(update=changes),))
        )
