"""GPU figures in the evidence of a sweep, and their sources."""

from dataclasses import replace

import pytest

from autotune.trials.job_figures import GpuUseFigures, WindowFigures
from autotune.trials.outcomes import Measured
from autotune.workers.gpu_figures import gpu_source, mean_gpu_use
from testbed.examples.feeds import ON_CPU, FeedMachine, evidence_of, knee_at, sweep_on
from testbed.examples.gpu_facts import H200
from testbed.examples.trials import WINDOW_FIGURES

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


def window_with(*gpus: dict) -> WindowFigures:
    """Return a window with the use of these GPUs."""
    window = WindowFigures.of(Measured(figures=WINDOW_FIGURES))
    return replace(window, gpus=tuple(GpuUseFigures(**gpu) for gpu in gpus))


def test_gpu_use_is_a_mean_over_gpus():
    idler = GPU | {"utilisation_share": 0.7}
    assert mean_gpu_use([window_with(GPU, idler)]).utilisation_share == pytest.approx(
        (0.9 + 0.7) / 2
    )


def test_gpu_use_is_a_mean_over_windows():
    slower = GPU | {"sm_clock_mhz": 1300.0}
    windows = [window_with(GPU), window_with(slower)]
    assert mean_gpu_use(windows).sm_clock_mhz == pytest.approx((1500 + 1300) / 2)


def test_mean_leaves_out_gpus_without_a_figure():
    without_tensor_cores = GPU | {"gpm_tensor_share": None}
    use = mean_gpu_use([window_with(GPU, without_tensor_cores)])
    assert use.gpm_tensor_share == pytest.approx(0.4)


def test_figure_that_no_gpu_has_is_missing():
    assert mean_gpu_use([window_with(GPU, GPU)]).gpm_dram_share is None


def test_windows_without_gpus_have_no_use():
    assert mean_gpu_use([window_with()]) is None


@pytest.fixture
def evidence(tmp_path):
    """Return the evidence of a sweep whose windows all have two GPUs."""
    machine = FeedMachine(knee_at(1), gpus=[GPU, GPU])
    return evidence_of(sweep_on(machine, tmp_path), ON_GPU)


def test_every_row_has_the_use_of_gpus(evidence):
    assert [row.num_workers for row in evidence.rows] == [0, 1]
    assert [row.gpu.power_w for row in evidence.rows] == [400.0, 400.0]


def test_evidence_describes_the_state_of_gpus(evidence):
    assert (
        evidence.operating_state
        == "400 W, SM clock 1,500 MHz, at the power cap in 50 % of samples"
    )


def test_cpu_run_has_no_source():
    assert gpu_source(ON_CPU, [window_with()]) == "n/a (CPU run: no driver)"


def test_replayed_step_has_no_source():
    windows = [window_with()]
    assert gpu_source(ON_GPU, windows, replayed=True) == "n/a (simulated step)"


@pytest.mark.parametrize(
    ("gpus", "source"),
    [
        pytest.param(
            [],
            "NVIDIA H200; NVML utilisation: n/a (no samples); GPM: n/a (no counters)",
            id="no samples",
        ),
        pytest.param(
            [{"lacking": "lost", "gpm_windows": 1}],
            "NVIDIA H200; NVML utilisation: n/a (lost);"
            " GPM counters during the timed windows",
            id="no NVML",
        ),
        pytest.param(
            [{"utilisation_share": 0.9, "gpm_lacking": "no Hopper"}],
            "NVIDIA H200; NVML utilisation; GPM: n/a (no Hopper)",
            id="no GPM",
        ),
        pytest.param(
            [{"utilisation_share": 0.9, "gpm_windows": 1}],
            "NVIDIA H200; NVML utilisation; GPM counters during the timed windows",
            id="NVML and GPM",
        ),
    ],
)
def test_names_the_source_of_each_figure(gpus, source):
    assert gpu_source(ON_GPU, [window_with(*gpus)]) == source
