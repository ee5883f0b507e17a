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
from autotune.trials.decide import contamination
from autotune.trials.decide.contamination import (
    gpu_use,
    is_above_baseline,
    judge,
    with_gpus,
)
from autotune.trials.values import (
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
FREE = {"used_bytes": GIB // 2, "holders": ()}
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
sizes = st.integers(0, 200 * GIB)


@given(baseline=sizes, difference=st.integers(-(2**30), 2**30))
def test_only_what_exceeds_the_tolerance_is_above_the_baseline_and_growth_is_told_with_holders(
    baseline, difference
):
    assert is_above_baseline(baseline, baseline + difference) == (
        difference > contamination.MEMORY_TOLERANCE_BYTES
    )
    assert not is_above_baseline(UNKNOWN, baseline)
    assert not is_above_baseline(baseline, UNKNOWN)
    holders = (HOLDER, GpuProcess(pid=7, used_bytes=None))
    assert (
        contamination.describe_growth("GPU 3", int(3.5 * GIB), holders, GIB // 2, 30.0)
        == "GPU 3 still holds 3.5 GiB after a wait of 30 s, up from 512 MiB before the"
        " first trial (pid 42: 256 MiB, pid 7: n/a)"
    )


def sampled(*reasons):
    return [replace(SAMPLE, throttle_reasons=one, temperature_c=91) for one in reasons]


HOT, BOTH, FINE = ("hw_thermal",), ("hw_slowdown", "hw_thermal"), ()
FAULTS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        *(
            (
                sampled(("sw_power_cap", one), FINE, ("sw_power_cap", one)),
                f"{one} in 2 of 3 samples",
            )
            for one in FAULTS
        ),
        (
            sampled(BOTH, BOTH, HOT),
            "hw_slowdown in 2 of 3 samples, hw_thermal in 3 of 3 samples",
        ),
        (sampled(HOT, None, HOT), "hw_thermal in 2 of 2 samples"),
        (sampled(HOT), "hw_thermal in 1 of 1 samples"),
        *(
            (sampled(reasons), None)
            for reasons in (
                ("sw_power_cap",),
                ("gpu_idle", "unknown_0x800"),
                FINE,
                None,
            )
        ),
        ([], None),
        # A moment of heat is tolerated; more than a tenth of the samples that were read
        # is not.
        (sampled(HOT, FINE), None),
        (sampled(*[HOT] * 2, *[FINE] * 18, *[None] * 20), None),
        (
            sampled(*[HOT] * 3, *[FINE] * 17, *[None] * 20),
            "hw_thermal in 3 of 20 samples",
        ),
    ],
)
def test_heat_and_hardware_slowdown_are_faults_and_operating_states_are_not(
    samples, words
):
    assert contamination.describe_slowdown("GPU 3", samples) == (
        words and f"GPU 3 was slowed down: {words}, at up to 91 °C"
    )
    unread = [replace(one, temperature_c=None) for one in samples]
    assert contamination.describe_slowdown("GPU 3", unread) == (
        words and f"GPU 3 was slowed down: {words}"
    )


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((1, 3, 1), "another process used GPU 3: 3 processes in 1 of 3 samples"),
        ((None, 2), "another process used GPU 3: 2 processes in 1 of 1 samples"),
        ((1, 0), None),
        ((None,), None),
        ((), None),
    ],
)
def test_a_second_process_is_company_and_the_trials_own_is_not(counts, words):
    samples = [replace(SAMPLE, process_count=count) for count in counts]
    assert contamination.describe_other_processes("GPU 3", samples) == words


@pytest.mark.parametrize(
    "kind", [OutOfMemory, HostOutOfMemory, TimedOut, Crashed, Contaminated]
)
def test_refusals_and_figures_are_void_for_any_reason_and_other_failures_stay(kind):
    for outcome in (kind(detail="d"), Measured(figures={"loss": 1.0})):
        is_void = isinstance(outcome, OutOfMemory | Measured)
        assert judge(outcome, ["one", "two"]) == (
            Contaminated(detail="one; two") if is_void else outcome
        )
        assert judge(outcome, []) is outcome


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"used_bytes": 3 * GIB},
            "3 GiB allocated (no visible process, perhaps another user's)",
        ),
        ({"holders": (HOLDER,)}, "512 MiB allocated (pid 42: 256 MiB)"),
        (
            {"used_bytes": UNKNOWN, "holders": (GpuProcess(pid=42, used_bytes=None),)},
            "n/a allocated (pid 42: n/a)",
        ),
        (
            {"used_bytes": 3 * GIB, "holders": UNKNOWN},
            (
                "3 GiB allocated (processes cannot be listed: NVML: Insufficient"
                " Permissions)"
            ),
        ),
        ({}, None),
        ({"used_bytes": UNKNOWN}, None),
        ({"holders": UNKNOWN}, None),
        ({"used_bytes": 2 * GIB}, None),
        (
            {"used_bytes": 2 * GIB + 1},
            "2 GiB allocated (no visible process, perhaps another user's)",
        ),
    ],
)
def test_users_of_a_gpu_are_named(changes, words):
    found = contamination.describe_other_users("GPU 3", **FREE | changes)
    assert found == (words and f"GPU 3 is already in use: {words}")


def test_each_figure_is_combined_as_it_means():
    hot = replace(
        SAMPLE,
        utilisation=1.0,
        used_bytes=300,
        power_w=500.0,
        sm_clock_mhz=1700,
        temperature_c=70,
        throttle_reasons=("sw_power_cap",),
    )
    found = gpu_use(
        GpuSeries(
            samples=(SAMPLE, hot, SAMPLE), gpm=(GPM, replace(GPM, sm_utilisation=0.8))
        )
    )
    assert found.utilisation_share == pytest.approx(2 / 3)
    assert (found.used_bytes, found.sm_clock_mhz, found.temperature_c) == (
        300,
        1500,
        70,
    )
    assert (found.power_w, found.power_capped_share) == pytest.approx((1100 / 3, 1 / 3))
    assert (found.gpm_sm_share, found.gpm_pcie_rx_bytes_per_s) == pytest.approx(
        (0.7, 1e6)
    )
    assert (found.samples, found.gpm_windows, found.lacking, found.gpm_lacking) == (
        3,
        2,
        None,
        None,
    )


def test_a_figure_that_is_missing_is_that_of_the_other_samples_or_missing_and_the_drivers_reason_is_told():
    blind = replace(SAMPLE, utilisation=None, power_w=None, throttle_reasons=None)
    some = gpu_use(GpuSeries(samples=(blind, SAMPLE)))
    assert (some.utilisation_share, some.power_w, some.power_capped_share) == (
        0.5,
        300.0,
        0.0,
    )
    none = gpu_use(GpuSeries(samples=(blind,), gpm=(GPM,)))
    missing = (
        none.utilisation_share,
        none.power_w,
        none.power_capped_share,
        none.gpm_dram_share,
    )
    assert missing == (None,) * 4
    assert none.used_bytes == 100
    found = gpu_use(GpuSeries(lacking="no permission", gpm_lacking="no Hopper"))
    assert (found.samples, found.lacking, found.gpm_lacking) == (
        0,
        "no permission",
        "no Hopper",
    )
    assert gpu_use(GpuSeries()).lacking == "no sample fell into the window"
    assert (
        gpu_use(GpuSeries()).gpm_lacking == "no counter interval fell into the window"
    )
    assert (
        gpu_use(GpuSeries(samples=(SAMPLE,), lacking="once it was refused")).lacking
        is None
    )


@pytest.mark.parametrize(
    ("energies_j", "power_w"),
    [
        ((1e6, 1e6 + 600, 1e6 + 1200), 600.0),  # NVML's own is still that of before
        ((None, 1e6, 1e6 + 600, None), 600.0),
        # Without a count that grows the mean of the readings is taken.
        *(
            (energies_j, 350.0)
            for energies_j in ((None, None), (None, 7.0), (7.0, 7.0), (7.0, 1.0))
        ),
        ((), None),
    ],
)
def test_power_is_what_the_energy_between_first_and_last_sample_makes(
    energies_j, power_w
):
    at = enumerate(energies_j)
    samples = [
        replace(SAMPLE, time_s=10.0 + s, power_w=300.0 + 100 * s, energy_j=energy_j)
        for s, energy_j in at
    ]
    assert gpu_use(GpuSeries(samples=tuple(samples))).power_w == power_w


def test_only_what_lies_in_the_window_counts_for_each_gpu():
    outcome = Measured(
        figures={"window_start_s": 10.0, "window_end_s": 11.0, "steps": 3}
    )
    around = (
        replace(SAMPLE, time_s=9.9, utilisation=1.0),
        SAMPLE,
        replace(SAMPLE, time_s=11.1),
    )
    one = GpuSeries(samples=around, gpm=(GPM, replace(GPM, start_s=10.8, end_s=11.3)))
    found = with_gpus(outcome, [one, GpuSeries(lacking="lost")]).figures
    first, lost = found["gpus"]
    assert found["steps"] == 3
    assert (first["samples"], first["gpm_windows"], first["utilisation_share"]) == (
        1,
        1,
        0.5,
    )
    assert first["series"]["time_s"] == [10.0]
    assert (lost["samples"], lost["gpm_windows"], lost["lacking"], lost["series"]) == (
        0,
        0,
        "lost",
        {},
    )
    for without_window in (Crashed(detail="boom"), Measured(figures={"loss": 1.0})):
        assert with_gpus(without_window, [one]) is without_window
