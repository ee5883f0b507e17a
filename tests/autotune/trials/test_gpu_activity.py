"""Figures of GPU activity in a timed window, from samples and hardware counters."""

from dataclasses import replace

import pytest

from autotune.trials.decide.gpu_activity import window_gpu_use, with_gpu_activity
from autotune.trials.outcomes import Crashed, Measured
from testbed.fakes import GPM_WINDOW, SAMPLE
from trainer.formats.gpus import GpuSeries

QUIET_SAMPLE = replace(
    SAMPLE,
    time_s=10.0,
    utilisation=0.5,
    used_bytes=100,
    power_w=300.0,
    sm_clock_mhz=1500,
    throttle_reasons=(),
    temperature_c=50,
    energy_j=None,
)
BUSY_SAMPLE = replace(
    QUIET_SAMPLE,
    utilisation=1.0,
    used_bytes=300,
    power_w=500.0,
    sm_clock_mhz=1700,
    throttle_reasons=("sw_power_cap",),
    temperature_c=70,
)
INCOMPLETE_SAMPLE = replace(
    QUIET_SAMPLE, utilisation=None, power_w=None, throttle_reasons=None
)
COUNTERS = replace(GPM_WINDOW, start_s=10.0, end_s=10.5, sm_utilisation=0.6)
"""Hardware counters over half a second."""
BUSY_COUNTERS = replace(COUNTERS, sm_utilisation=0.8)


def test_samples_are_combined_figure_by_figure():
    samples = (QUIET_SAMPLE, BUSY_SAMPLE, QUIET_SAMPLE)
    use = window_gpu_use(GpuSeries(samples=samples))
    assert use.samples == 3
    # Means.
    assert use.utilisation_share == pytest.approx((0.5 + 1.0 + 0.5) / 3)
    assert use.power_w == pytest.approx((300 + 500 + 300) / 3)
    assert use.power_capped_share == pytest.approx(1 / 3)
    # The highest.
    assert use.used_bytes == 300
    assert use.temperature_c == 70
    # The median.
    assert use.sm_clock_mhz == 1500
    assert use.lacking is None


def test_figures_of_counters_are_means():
    use = window_gpu_use(GpuSeries(gpm=(COUNTERS, BUSY_COUNTERS)))
    assert use.gpm_windows == 2
    assert use.gpm_sm_share == pytest.approx((0.6 + 0.8) / 2)
    assert use.gpm_pcie_rx_bytes_per_s == GPM_WINDOW.pcie_rx_bytes_per_s
    assert use.gpm_lacking is None


def test_missing_figures_are_left_out_of_means():
    use = window_gpu_use(GpuSeries(samples=(INCOMPLETE_SAMPLE, QUIET_SAMPLE)))
    assert use.utilisation_share == 0.5
    assert use.power_w == 300.0
    assert use.power_capped_share == 0.0


def test_figure_missing_in_all_samples_is_none():
    without_dram = replace(COUNTERS, dram_active=None)
    use = window_gpu_use(GpuSeries(samples=(INCOMPLETE_SAMPLE,), gpm=(without_dram,)))
    assert use.utilisation_share is None
    assert use.power_w is None
    assert use.power_capped_share is None
    assert use.gpm_dram_share is None
    assert use.used_bytes == 100


def test_missing_samples_have_the_drivers_reason():
    use = window_gpu_use(GpuSeries(lacking="no permission", gpm_lacking="no Hopper"))
    assert use.samples == 0
    assert use.lacking == "no permission"
    assert use.gpm_lacking == "no Hopper"


def test_empty_window_has_its_own_reason():
    use = window_gpu_use(GpuSeries())
    assert use.lacking == "no sample fell into the window"
    assert use.gpm_lacking == "no counter interval fell into the window"


def test_known_utilisation_needs_no_reason():
    series = GpuSeries(samples=(QUIET_SAMPLE,), lacking="no permission at first")
    assert window_gpu_use(series).lacking is None


@pytest.mark.parametrize(
    ("energies_j", "power_w"),
    [
        pytest.param((1e6, 1e6 + 600, 1e6 + 1200), 600.0, id="counted"),
        pytest.param((None, 1e6, 1e6 + 600, None), 600.0, id="counted now and then"),
        # Without energy, power is the mean of the samples' own 300 and 400 W.
        pytest.param((None, None), 350.0, id="not counted"),
        pytest.param((None, 7.0), 350.0, id="counted once"),
        pytest.param((7.0, 7.0), 350.0, id="count that does not grow"),
        pytest.param((7.0, 1.0), 350.0, id="count that falls"),
        pytest.param((), None, id="no samples"),
    ],
)
def test_power_follows_from_energy_if_counted(energies_j, power_w):
    # One sample a second, with its own power of 300 W, 400 W and so on.
    samples = [
        replace(
            QUIET_SAMPLE,
            time_s=10.0 + seconds,
            power_w=300.0 + 100 * seconds,
            energy_j=energy_j,
        )
        for seconds, energy_j in enumerate(energies_j)
    ]
    assert window_gpu_use(GpuSeries(samples=tuple(samples))).power_w == power_w


WINDOW = Measured(figures={"window_start_s": 10.0, "window_end_s": 11.0, "steps": 3})
AROUND_THE_WINDOW = GpuSeries(
    samples=(
        replace(QUIET_SAMPLE, time_s=9.9, utilisation=1.0),
        QUIET_SAMPLE,
        replace(QUIET_SAMPLE, time_s=11.1),
    ),
    gpm=(COUNTERS, replace(COUNTERS, start_s=10.8, end_s=11.3)),
)
"""Activity of which only the sample at 10 s, and the counters from 10 s to 10.5 s, lie
in the window."""


def test_only_activity_in_the_window_counts():
    figures = with_gpu_activity(WINDOW, [AROUND_THE_WINDOW]).figures
    (gpu,) = figures["gpus"]
    assert figures["steps"] == 3
    assert gpu["samples"] == 1
    assert gpu["gpm_windows"] == 1
    assert gpu["utilisation_share"] == 0.5
    assert gpu["series"]["time_s"] == [10.0]


def test_gpu_without_samples_has_the_reason():
    unread = GpuSeries(lacking="GPU is lost")
    figures = with_gpu_activity(WINDOW, [AROUND_THE_WINDOW, unread]).figures
    _, unread_gpu = figures["gpus"]
    assert unread_gpu["samples"] == 0
    assert unread_gpu["gpm_windows"] == 0
    assert unread_gpu["lacking"] == "GPU is lost"
    assert unread_gpu["series"] == {}


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(Crashed(detail="boom"), id="crashed"),
        pytest.param(Measured(figures={"loss": 1.0}), id="measured without a window"),
    ],
)
def test_outcome_without_window_gets_no_activity(outcome):
    assert with_gpu_activity(outcome, [AROUND_THE_WINDOW]) is outcome
