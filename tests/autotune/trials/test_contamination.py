"""Which disturbances of a GPU spoil a trial, and what its samples add up to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.machine.values import (
    GpmWindow,
    GpuProcess,
    GpuSample,
    GpuSeries,
    Unavailable,
)
from autotune.trials.decide.contamination import (
    MEMORY_TOLERANCE_BYTES,
    describe_growth,
    describe_other_processes,
    describe_other_users,
    describe_slowdown,
    is_above_baseline,
    judge,
    window_gpu_use,
    with_gpu_activity,
)
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    OutOfMemory,
    TimedOut,
)

GIB = 2**30
UNKNOWN = Unavailable(reason="NVML: Insufficient Permissions")
HOLDER = GpuProcess(pid=42, used_bytes=GIB // 4)
HOLDER_OF_UNKNOWN_SIZE = GpuProcess(pid=7, used_bytes=None)
SAMPLE = GpuSample(
    time_s=10.0,
    utilisation=0.5,
    used_bytes=100,
    power_w=300.0,
    sm_clock_mhz=1500,
    throttle_reasons=(),
    temperature_c=50,
    process_count=1,
)
GPM = GpmWindow(
    start_s=10.0,
    end_s=10.5,
    sm_utilisation=0.6,
    sm_occupancy=0.2,
    tensor_active=0.4,
    dram_active=None,
    pcie_rx_bytes_per_s=1e6,
)
SIZES_BYTES = st.integers(0, 200 * GIB)


@given(baseline=SIZES_BYTES, difference=st.integers(-GIB, GIB))
def test_growth_beyond_tolerance_is_above_baseline(baseline, difference):
    is_above = is_above_baseline(baseline, baseline + difference)
    assert is_above == (difference > MEMORY_TOLERANCE_BYTES)


@given(SIZES_BYTES)
def test_unknown_memory_is_never_above_baseline(size):
    assert not is_above_baseline(UNKNOWN, size)
    assert not is_above_baseline(size, UNKNOWN)


def test_growth_names_the_holders():
    description = describe_growth(
        "GPU 3", int(3.5 * GIB), (HOLDER, HOLDER_OF_UNKNOWN_SIZE), GIB // 2, 30.0
    )
    assert description == (
        "GPU 3 still holds 3.5 GiB after a wait of 30 s, up from 512 MiB before the"
        " first trial (pid 42: 256 MiB, pid 7: n/a)"
    )


CAPPED = ("sw_power_cap",)
HOT = ("hw_thermal",)
HOT_AND_SLOW = ("hw_slowdown", "hw_thermal")
FINE = ()
UNREAD = None


def samples_with(*throttle_reasons):
    return [
        replace(SAMPLE, throttle_reasons=reasons, temperature_c=91)
        for reasons in throttle_reasons
    ]


def faulty(fault):
    return samples_with((*CAPPED, fault), FINE, (*CAPPED, fault))


@pytest.mark.parametrize(
    ("samples", "faults"),
    [
        (faulty("hw_slowdown"), "hw_slowdown in 2 of 3 samples"),
        (faulty("sw_thermal"), "sw_thermal in 2 of 3 samples"),
        (faulty("hw_thermal"), "hw_thermal in 2 of 3 samples"),
        (faulty("hw_power_brake"), "hw_power_brake in 2 of 3 samples"),
        (
            samples_with(HOT_AND_SLOW, HOT_AND_SLOW, HOT),
            "hw_slowdown in 2 of 3 samples, hw_thermal in 3 of 3 samples",
        ),
        (samples_with(HOT, UNREAD, HOT), "hw_thermal in 2 of 2 samples"),
        (samples_with(HOT), "hw_thermal in 1 of 1 samples"),
        (
            # More than a tenth of the samples that were read.
            samples_with(*[HOT] * 3, *[FINE] * 17, *[UNREAD] * 20),
            "hw_thermal in 3 of 20 samples",
        ),
    ],
)
def test_heat_or_hardware_slowdown_is_a_fault(samples, faults):
    assert describe_slowdown("GPU 3", samples) == (
        f"GPU 3 was slowed down: {faults}, at up to 91 °C"
    )
    unknown_heat = [replace(sample, temperature_c=None) for sample in samples]
    assert describe_slowdown("GPU 3", unknown_heat) == (
        f"GPU 3 was slowed down: {faults}"
    )


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([], id="no samples"),
        pytest.param(samples_with(CAPPED), id="power cap"),
        pytest.param(samples_with(("gpu_idle", "unknown_0x800")), id="idle"),
        pytest.param(samples_with(FINE), id="fine"),
        pytest.param(samples_with(UNREAD), id="unread"),
        pytest.param(samples_with(HOT, FINE), id="a moment of heat"),
        pytest.param(
            samples_with(*[HOT] * 2, *[FINE] * 18, *[UNREAD] * 20),
            id="heat in a tenth of the samples that were read",
        ),
    ],
)
def test_operating_states_are_no_fault(samples):
    unknown_heat = [replace(sample, temperature_c=None) for sample in samples]
    assert describe_slowdown("GPU 3", samples) is None
    assert describe_slowdown("GPU 3", unknown_heat) is None


@pytest.mark.parametrize(
    ("counts", "description"),
    [
        ((1, 3, 1), "another process used GPU 3: 3 processes in 1 of 3 samples"),
        ((None, 2), "another process used GPU 3: 2 processes in 1 of 1 samples"),
        ((1, 0), None),
        ((None,), None),
        ((), None),
    ],
)
def test_describes_processes_beside_the_trials_own(counts, description):
    samples = [replace(SAMPLE, process_count=count) for count in counts]
    assert describe_other_processes("GPU 3", samples) == description


@pytest.mark.parametrize(
    "outcome",
    [
        OutOfMemory(detail="d"),
        Measured(figures={"loss": 1.0}),
    ],
)
def test_reasons_void_figures_or_out_of_memory(outcome):
    assert judge(outcome, ["one", "two"]) == Contaminated(detail="one; two")
    assert judge(outcome, []) is outcome


@pytest.mark.parametrize("kind", [HostOutOfMemory, TimedOut, Crashed, Contaminated])
def test_other_failures_stay_for_any_reason(kind):
    outcome = kind(detail="d")
    assert judge(outcome, ["one", "two"]) is outcome
    assert judge(outcome, []) is outcome


@pytest.mark.parametrize(
    ("used_bytes", "holders", "use"),
    [
        (3 * GIB, (), "3 GiB allocated (no visible process, perhaps another user's)"),
        (GIB // 2, (HOLDER,), "512 MiB allocated (pid 42: 256 MiB)"),
        (UNKNOWN, (HOLDER_OF_UNKNOWN_SIZE,), "n/a allocated (pid 7: n/a)"),
        (
            3 * GIB,
            UNKNOWN,
            (
                "3 GiB allocated (processes cannot be listed: NVML: Insufficient"
                " Permissions)"
            ),
        ),
        (
            2 * GIB + 1,
            (),
            "2 GiB allocated (no visible process, perhaps another user's)",
        ),
    ],
)
def test_describes_users_of_a_gpu(used_bytes, holders, use):
    description = describe_other_users("GPU 3", used_bytes, holders)
    assert description == f"GPU 3 is already in use: {use}"


@pytest.mark.parametrize(
    ("used_bytes", "holders"),
    [(GIB // 2, ()), (UNKNOWN, ()), (GIB // 2, UNKNOWN), (2 * GIB, ())],
)
def test_gpu_with_only_the_drivers_reserve_is_free(used_bytes, holders):
    assert describe_other_users("GPU 3", used_bytes, holders) is None


def test_each_figure_is_combined_in_its_own_way():
    hot = replace(
        SAMPLE,
        utilisation=1.0,
        used_bytes=300,
        power_w=500.0,
        sm_clock_mhz=1700,
        temperature_c=70,
        throttle_reasons=CAPPED,
    )
    use = window_gpu_use(
        GpuSeries(
            samples=(SAMPLE, hot, SAMPLE), gpm=(GPM, replace(GPM, sm_utilisation=0.8))
        )
    )
    assert use.samples == 3
    assert use.utilisation_share == pytest.approx(2 / 3)
    assert use.used_bytes == 300
    assert use.sm_clock_mhz == 1500
    assert use.temperature_c == 70
    assert use.power_w == pytest.approx(1100 / 3)
    assert use.power_capped_share == pytest.approx(1 / 3)
    assert use.lacking is None
    assert use.gpm_windows == 2
    assert use.gpm_sm_share == pytest.approx(0.7)
    assert use.gpm_pcie_rx_bytes_per_s == pytest.approx(1e6)
    assert use.gpm_lacking is None


BLIND = replace(SAMPLE, utilisation=None, power_w=None, throttle_reasons=None)


def test_missing_figures_are_left_out_of_means():
    use = window_gpu_use(GpuSeries(samples=(BLIND, SAMPLE)))
    assert use.utilisation_share == 0.5
    assert use.power_w == 300.0
    assert use.power_capped_share == 0.0


def test_figure_missing_in_all_samples_is_none():
    use = window_gpu_use(GpuSeries(samples=(BLIND,), gpm=(GPM,)))
    assert use.utilisation_share is None
    assert use.power_w is None
    assert use.power_capped_share is None
    assert use.gpm_dram_share is None
    assert use.used_bytes == 100


def test_missing_samples_give_the_drivers_reason():
    use = window_gpu_use(GpuSeries(lacking="no permission", gpm_lacking="no Hopper"))
    assert use.samples == 0
    assert use.lacking == "no permission"
    assert use.gpm_lacking == "no Hopper"


def test_empty_window_gives_its_own_reason():
    use = window_gpu_use(GpuSeries())
    assert use.lacking == "no sample fell into the window"
    assert use.gpm_lacking == "no counter interval fell into the window"


def test_known_utilisation_needs_no_reason():
    series = GpuSeries(samples=(SAMPLE,), lacking="once it was refused")
    assert window_gpu_use(series).lacking is None


@pytest.mark.parametrize(
    ("energies_j", "power_w"),
    [
        # The power that NVML itself reports is still that of before.
        ((1e6, 1e6 + 600, 1e6 + 1200), 600.0),
        ((None, 1e6, 1e6 + 600, None), 600.0),
        # Without a count that grows the mean of the samples is taken.
        ((None, None), 350.0),
        ((None, 7.0), 350.0),
        ((7.0, 7.0), 350.0),
        ((7.0, 1.0), 350.0),
        ((), None),
    ],
)
def test_power_follows_from_energy_if_counted(energies_j, power_w):
    samples = [
        replace(
            SAMPLE,
            time_s=10.0 + second,
            power_w=300.0 + 100 * second,
            energy_j=energy_j,
        )
        for second, energy_j in enumerate(energies_j)
    ]
    assert window_gpu_use(GpuSeries(samples=tuple(samples))).power_w == power_w


WINDOW = Measured(figures={"window_start_s": 10.0, "window_end_s": 11.0, "steps": 3})
AROUND_THE_WINDOW = GpuSeries(
    samples=(
        replace(SAMPLE, time_s=9.9, utilisation=1.0),
        SAMPLE,
        replace(SAMPLE, time_s=11.1),
    ),
    gpm=(GPM, replace(GPM, start_s=10.8, end_s=11.3)),
)


def test_only_activity_in_the_window_counts():
    lost = GpuSeries(lacking="lost")
    figures = with_gpu_activity(WINDOW, [AROUND_THE_WINDOW, lost]).figures
    first_gpu, lost_gpu = figures["gpus"]
    assert figures["steps"] == 3
    assert first_gpu["samples"] == 1
    assert first_gpu["gpm_windows"] == 1
    assert first_gpu["utilisation_share"] == 0.5
    assert first_gpu["series"]["time_s"] == [10.0]
    assert lost_gpu["samples"] == 0
    assert lost_gpu["gpm_windows"] == 0
    assert lost_gpu["lacking"] == "lost"
    assert lost_gpu["series"] == {}


@pytest.mark.parametrize(
    "outcome", [Crashed(detail="boom"), Measured(figures={"loss": 1.0})]
)
def test_outcome_without_window_gets_no_activity(outcome):
    assert with_gpu_activity(outcome, [AROUND_THE_WINDOW]) is outcome
