"""No rate beyond a data sheet, and none of a pretended GPU, is kept."""

import pytest

from autotune.core.outcome import Measured
from autotune.core.trial import Trial
from autotune.decide.physical import SLACK, Rate, check_profile, check_rates, check_real, rates_of_trial
from autotune.errors import MachineLacks, Undecided
from tests.autotune.profiles import example_profile
from trainer.peaks import MEMORY_BYTES_PER_S, PEAKS
from trainer.presets import model_settings

NVL = "NVIDIA H100 NVL"
NULL = "0.0 (nullgpu)"
CONFIG = {"precision": "bf16"}


def test_a_rate_beyond_the_data_sheet_is_rejected_with_gpu_rate_and_limit():
    check_rates(NVL, [Rate(what="products", per_s=SLACK * 835e12)])
    with pytest.raises(
        Undecided, match=r"products: 8,600 TFLOP/s in bf16 measured on NVIDIA H100 NVL, which .* 835 at"
    ):
        check_rates(NVL, [Rate(what="products", per_s=8.6e15)])
    with pytest.raises(Undecided, match="in tf32"):
        check_rates(NVL, [Rate(what="products", per_s=500e12, of="tf32")])
    with pytest.raises(Undecided, match="memory"):
        check_rates(NVL, [Rate(what="copies", per_s=4.2e12, of="memory")])


@pytest.mark.parametrize("name", [None, "NVIDIA Unheard Of", "NVIDIA H100 NVL MIG 1g.12gb"])
def test_nothing_is_known_of_other_devices(name):
    check_rates(name, [Rate(what="products", per_s=1e18), Rate(what="copies", per_s=1e18, of="memory")])


def test_every_gpu_with_a_peak_has_a_bandwidth():
    assert set(MEMORY_BYTES_PER_S) == {peak.name for peak in PEAKS}


@pytest.mark.parametrize(
    ("job", "measured", "figures"),
    [
        ("step", {"config": CONFIG}, {"model_flops_per_step": 2e15, "step_s": [0.9, 1.0, 1.1], "local_ranks": 2}),
        ("feed", {"config": CONFIG}, {"model_flops_per_s": 2e15, "local_ranks": 2}),
        ("links", {}, {"products_flops_per_s": [1e12, 1e15]}),
        (
            "matmul",
            {"device": "cuda", "dtype": "bfloat16"},
            {"flops_per_s": 1e15, "copy_bytes_per_s": 3e12},
        ),
    ],
)
def test_every_job_that_measures_a_rate_is_checked_per_gpu(job, measured, figures):
    trial = Trial(job=job, measured=measured, timeout_s=1.0)
    rates = list(rates_of_trial(trial, Measured(figures=figures)))
    assert 1e15 in [rate.per_s for rate in rates]
    with pytest.raises(Undecided, match="1,000 TFLOP/s"):
        check_rates(NVL, rates)
    check_rates("NVIDIA B200", rates)


def gpu_profile(rate, driver="580.1"):
    profile = example_profile()
    train = profile.train.model_copy(
        update={"model": model_settings("bert-120m"), "precision": "bf16", "device": "cuda"}
    )
    here = profile.fingerprint.model_copy(update={"device": "cuda", "gpu_name": NVL, "driver": driver})
    probe = profile.evidence.probe
    curve = [point.model_copy(update={"slot_tokens_per_s": rate}) for point in probe.curve]
    probe = probe.model_copy(update={"curve": curve, "parameters": 110_000_000})
    evidence = profile.evidence.model_copy(update={"probe": probe})
    return profile.model_copy(update={"train": train, "fingerprint": here, "evidence": evidence})


def test_a_profile_whose_tokens_per_second_ask_for_more_than_the_gpu_has_is_rejected():
    check_profile(gpu_profile(600_000.0))
    with pytest.raises(Undecided, match=r"1 rows: .* TFLOP/s in bf16 measured on NVIDIA H100 NVL"):
        check_profile(gpu_profile(3_000_000.0))


def test_a_profile_of_a_pretended_gpu_keeps_sizes_and_no_rates():
    with pytest.raises(MachineLacks, match=r"pretended NVIDIA H100 NVL \(driver 0.0 \(nullgpu\)\)"):
        check_profile(gpu_profile(600_000.0, NULL))
    profile = gpu_profile(600_000.0, NULL)
    probe = profile.evidence.probe.model_copy(update={"curve": []})
    check_profile(
        profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"probe": probe, "workers": None})})
    )
    assert profile.fingerprint.bytes_known == "allocator"
    assert gpu_profile(600_000.0).fingerprint.bytes_known == "measured"


def test_a_real_driver_and_none_are_real():
    check_real(NVL, "580.95.05", "tokens/s")
    check_real(None, None, "tokens/s")
