"""GPU figures in the evidence of a sweep, and their sources."""

from dataclasses import replace

import pytest

from autotune.trials.job_figures import GpuUseFigures, TrainingFigures
from autotune.trials.outcomes import Measured
from autotune.workers.measure import evidence, gpu_source
from testbed.examples.feeds import ON_CPU, FeedMachine, knee_at, sweep_on
from testbed.examples.trials import TRAINING_FIGURES
from tests.autotune.machine.test_measured_device import H200

GPU = {
    "samples": 10,
    "utilisation_share": 0.9,
    "power_w": 400.0,
    "sm_clock_mhz": 1500.0,
    "power_capped_share": 0.5,
    "gpm_windows": 2,
    "gpm_tensor_share": 0.4,
    "series": {"time_s": [1.0]},
}
"""Use of a GPU in a window, without its DRAM."""
ON_GPU = replace(ON_CPU, device="cuda", gpus=(H200,), gpu_absent=None)


def sweep_with(first, second, directory):
    """Return the evidence of a sweep whose windows all have two such GPUs."""
    sweep = sweep_on(FeedMachine(knee_at(1), gpus=[first, second]), directory)
    return evidence(sweep, sweep.run(), ON_GPU)


def test_gpu_use_is_a_mean_over_gpus(tmp_path):
    busier = GPU | {"utilisation_share": 0.9}
    other = GPU | {"utilisation_share": 0.7}
    for row in sweep_with(busier, other, tmp_path).rows:
        assert row.gpu.utilisation_share == pytest.approx(0.8)


def test_mean_leaves_out_gpus_without_a_figure(tmp_path):
    other = GPU | {"gpm_tensor_share": None}
    for row in sweep_with(GPU, other, tmp_path).rows:
        assert row.gpu.gpm_tensor_share == pytest.approx(0.4)


def test_figure_that_no_gpu_has_is_missing(tmp_path):
    for row in sweep_with(GPU, GPU, tmp_path).rows:
        assert row.gpu.gpm_dram_share is None


def test_evidence_describes_the_state_of_gpus(tmp_path):
    workers = sweep_with(GPU, GPU, tmp_path)
    assert (
        workers.operating_state
        == "400 W, SM clock 1,500 MHz, at the power cap in 50 % of samples"
    )


@pytest.mark.parametrize(
    ("site", "gpu_figures", "replayed", "words", "absent_words"),
    [
        pytest.param(
            ON_CPU, None, False, ["n/a (CPU run: no driver)"], "NVML", id="cpu"
        ),
        pytest.param(
            ON_GPU, None, True, ["n/a (simulated step)"], "NVML", id="replayed step"
        ),
        pytest.param(
            ON_GPU,
            None,
            False,
            ["NVML utilisation: n/a (no samples)", "GPM: n/a (no counters)"],
            "MFU",
            id="no samples",
        ),
        pytest.param(
            ON_GPU,
            {"lacking": "lost", "gpm_windows": 1},
            False,
            ["NVML utilisation: n/a (lost)"],
            "MFU",
            id="no NVML",
        ),
        pytest.param(
            ON_GPU,
            {"samples": 3, "gpm_lacking": "no Hopper"},
            False,
            ["GPM: n/a (no Hopper)"],
            "GPM counters",
            id="no GPM",
        ),
        pytest.param(
            ON_GPU,
            {"samples": 3, "utilisation_share": 0.9, "gpm_windows": 1},
            False,
            ["NVIDIA H200; NVML utilisation", "GPM counters"],
            "n/a",
            id="both",
        ),
    ],
)
def test_names_the_source_of_gpu_figures(
    site, gpu_figures, replayed, words, absent_words
):
    window = TrainingFigures.of(Measured(figures=TRAINING_FIGURES))
    if gpu_figures is not None:
        window = replace(window, gpus=(GpuUseFigures(**gpu_figures),))
    source = gpu_source(site, [window], replayed=replayed)
    assert all(word in source for word in words)
    assert absent_words not in source
