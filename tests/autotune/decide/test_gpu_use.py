from dataclasses import replace

import pytest

from autotune.core.hardware import GpmWindow, GpuSample, GpuSeries
from autotune.core.outcome import Crashed, Measured
from autotune.decide.gpu_use import gpu_use, mean_power_w, with_gpus

SAMPLE = GpuSample(
    time_s=10.0, utilisation=0.5, used_bytes=100, power_w=300.0, sm_clock_mhz=1500, throttle_reasons=(),
    temperature_c=50, process_count=1,
)  # fmt: skip
GPM = GpmWindow(
    start_s=10.0, end_s=10.5, sm_utilisation=0.6, sm_occupancy=0.2, tensor_active=0.4, dram_active=None,
    pcie_rx_bytes_per_s=1e6,
)  # fmt: skip


def test_each_figure_is_combined_as_it_means():
    hot = replace(
        SAMPLE, utilisation=1.0, used_bytes=300, power_w=500.0, sm_clock_mhz=1700, temperature_c=70,
        throttle_reasons=("sw_power_cap",),
    )  # fmt: skip
    found = gpu_use(GpuSeries(samples=(SAMPLE, hot, SAMPLE), gpm=(GPM, replace(GPM, sm_utilisation=0.8))))
    assert found.utilisation_share == pytest.approx(2 / 3)
    assert found.used_bytes == 300
    assert found.power_w == pytest.approx(1100 / 3)
    assert found.sm_clock_mhz == 1500
    assert found.temperature_c == 70
    assert found.power_capped_share == pytest.approx(1 / 3)
    assert found.gpm_sm_share == pytest.approx(0.7)
    assert found.gpm_pcie_rx_bytes_per_s == 1e6
    assert (found.samples, found.gpm_windows, found.lacking, found.gpm_lacking) == (3, 2, None, None)


def test_a_figure_that_is_missing_is_that_of_the_other_samples_or_missing_and_not_zero():
    blind = replace(SAMPLE, utilisation=None, power_w=None, throttle_reasons=None)
    some = gpu_use(GpuSeries(samples=(blind, SAMPLE)))
    assert (some.utilisation_share, some.power_w, some.power_capped_share) == (0.5, 300.0, 0.0)
    none = gpu_use(GpuSeries(samples=(blind,), gpm=(GPM,)))
    missing = (none.utilisation_share, none.power_w, none.power_capped_share, none.gpm_dram_share)
    assert missing == (None,) * 4
    assert none.used_bytes == 100


def test_power_is_what_the_energy_between_first_and_last_sample_makes():
    lagging = [replace(SAMPLE, time_s=10.0 + second, energy_j=1e6 + 600.0 * second) for second in range(3)]
    assert mean_power_w(lagging) == pytest.approx(600.0)  # NVML's own is still that of before
    assert mean_power_w([SAMPLE, *lagging, SAMPLE]) == pytest.approx(600.0)
    assert gpu_use(GpuSeries(samples=tuple(lagging))).power_w == pytest.approx(600.0)


@pytest.mark.parametrize("energies_j", [(None, None), (None, 7.0), (7.0, 7.0), (7.0, 1.0)])
def test_power_without_a_count_of_energy_that_grows_is_the_mean_of_the_readings(energies_j):
    samples = [
        replace(SAMPLE, time_s=10.0 + second, power_w=300.0 + 100 * second, energy_j=energy_j)
        for second, energy_j in enumerate(energies_j)
    ]
    assert mean_power_w(samples) == 350.0
    assert mean_power_w([]) is None


def test_without_samples_the_drivers_reason_is_told_or_that_none_fell_into_the_window():
    found = gpu_use(GpuSeries(lacking="no permission", gpm_lacking="no Hopper"))
    assert (found.samples, found.lacking, found.gpm_lacking) == (0, "no permission", "no Hopper")
    assert gpu_use(GpuSeries()).lacking == "no sample fell into the window"
    assert gpu_use(GpuSeries()).gpm_lacking == "no window of counters lay in it"
    assert gpu_use(GpuSeries(samples=(SAMPLE,), lacking="once it was refused")).lacking is None


def test_only_what_lies_in_the_window_counts_for_each_gpu():
    outcome = Measured(figures={"window_start_s": 10.0, "window_end_s": 11.0, "steps": 3})
    one = GpuSeries(
        samples=(replace(SAMPLE, time_s=9.9, utilisation=1.0), SAMPLE, replace(SAMPLE, time_s=11.1)),
        gpm=(GPM, replace(GPM, start_s=10.8, end_s=11.3)),
    )
    found = with_gpus(outcome, [one, GpuSeries(lacking="lost")]).figures
    assert found["steps"] == 3
    assert [gpu["samples"] for gpu in found["gpus"]] == [1, 0]
    assert [gpu["gpm_windows"] for gpu in found["gpus"]] == [1, 0]
    assert found["gpus"][0]["utilisation_share"] == 0.5
    assert found["gpus"][0]["series"]["time_s"] == [10.0]
    assert found["gpus"][1]["lacking"] == "lost"
    assert found["gpus"][1]["series"] == {}


@pytest.mark.parametrize("outcome", [Crashed(detail="boom"), Measured(figures={"loss": 1.0})])
def test_what_is_no_window_stays_as_it_is(outcome):
    assert with_gpus(outcome, [GpuSeries(samples=(SAMPLE,))]) is outcome
