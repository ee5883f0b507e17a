from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.hardware import GpuProcess, GpuSample, Unavailable
from autotune.core.outcome import Contaminated, Crashed, HostOutOfMemory, Measured, OutOfMemory, TimedOut
from autotune.decide.contamination import (
    MEMORY_TOLERANCE_BYTES,
    GpuHolders,
    describe_company,
    describe_growth,
    describe_other_users,
    describe_slowdown,
    is_above_baseline,
    judge,
)

GIB = 2**30
UNKNOWN = Unavailable(reason="NVML: Insufficient Permissions")
FREE = GpuHolders(gpu="GPU 3", used_bytes=GIB // 2, processes=())
SAMPLE = GpuSample(
    time_s=1.0, utilisation=1.0, used_bytes=GIB, power_w=700.0, sm_clock_mhz=1700, throttle_reasons=("sw_power_cap",),
    temperature_c=61,
)  # fmt: skip
sizes = st.integers(0, 200 * GIB)


@given(baseline=sizes, used=sizes, more=sizes)
def test_more_memory_is_never_closer_to_the_baseline(baseline, used, more):
    assert is_above_baseline(baseline, used) <= is_above_baseline(baseline, used + more)


@given(baseline=sizes, difference=st.integers(-(2**30), 2**30))
def test_only_what_exceeds_the_tolerance_is_above_the_baseline(baseline, difference):
    assert is_above_baseline(baseline, baseline + difference) == (difference > MEMORY_TOLERANCE_BYTES)


@pytest.mark.parametrize(("baseline", "used"), [(UNKNOWN, 80 * GIB), (0, UNKNOWN), (UNKNOWN, UNKNOWN)])
def test_missing_readings_are_not_above_the_baseline(baseline, used):
    assert not is_above_baseline(baseline, used)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ((GpuProcess(pid=42, used_bytes=3 * GIB), GpuProcess(pid=7, used_bytes=None)), "(pid 42: 3 GiB, pid 7: n/a)"),
        ((), "(no process on it can be seen from here)"),
        (UNKNOWN, "(by whom cannot be read: NVML: Insufficient Permissions)"),
    ],
)
def test_growth_is_told_with_gpu_bytes_and_holders(processes, words):
    use = GpuHolders(gpu="GPU 3", used_bytes=int(3.5 * GIB), processes=processes)
    expected = f"GPU 3 still holds 3.5 GiB after 30 s of waiting, and held 512 MiB before the first trial {words}"
    assert describe_growth(use, GIB // 2, 30.0) == expected


@pytest.mark.parametrize("fault", ["hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"])
def test_heat_and_hardware_slowdown_are_faults(fault):
    hot = replace(SAMPLE, throttle_reasons=("sw_power_cap", fault), temperature_c=91)
    found = describe_slowdown("GPU 3", [hot, SAMPLE, hot])
    assert found == f"GPU 3 was slowed down: {fault} in 2 of 3 samples, at up to 91 °C"


@pytest.mark.parametrize(
    ("slowed", "samples", "is_void"), [(1, 20, False), (2, 20, False), (3, 20, True), (1, 2, False), (2, 3, True)]
)
def test_a_moment_of_heat_is_tolerated_and_more_than_a_tenth_of_the_samples_is_not(slowed, samples, is_void):
    hot = [replace(SAMPLE, throttle_reasons=(fault,)) for fault in ("sw_thermal", "hw_thermal", "hw_slowdown")]
    unread = [replace(SAMPLE, throttle_reasons=None)] * 20
    found = describe_slowdown("GPU 3", hot[:slowed] + [SAMPLE] * (samples - slowed) + unread)
    assert (found is not None) == is_void


def test_every_fault_is_counted_by_itself():
    samples = [replace(SAMPLE, throttle_reasons=("hw_slowdown", "hw_thermal"), temperature_c=None)] * 2
    samples += [replace(SAMPLE, throttle_reasons=("hw_thermal",), temperature_c=None)]
    expected = "GPU 3 was slowed down: hw_slowdown in 2 of 3 samples, hw_thermal in 3 of 3 samples"
    assert describe_slowdown("GPU 3", samples) == expected


@pytest.mark.parametrize("reasons", [("sw_power_cap",), ("gpu_idle", "applications_clocks"), ("unknown_0x800",), ()])
def test_power_cap_and_idling_are_operating_states(reasons):
    assert describe_slowdown("GPU 3", [replace(SAMPLE, throttle_reasons=reasons)]) is None


def test_samples_without_throttle_reasons_tell_nothing_and_are_not_counted():
    unread = replace(SAMPLE, throttle_reasons=None)
    assert describe_slowdown("GPU 3", []) is None
    assert describe_slowdown("GPU 3", [unread]) is None
    hot = replace(SAMPLE, throttle_reasons=("hw_thermal",))
    assert "in 2 of 2 samples" in describe_slowdown("GPU 3", [hot, unread, hot])


def test_second_process_is_company_and_the_trials_own_is_not():
    alone, together = replace(SAMPLE, process_count=1), replace(SAMPLE, process_count=3)
    assert describe_company("GPU 3", [alone, together, alone]) == (
        "another process computed on GPU 3: 3 were on it in 1 of 3 samples"
    )
    assert describe_company("GPU 3", [alone, replace(SAMPLE, process_count=0)]) is None


def test_samples_without_a_process_count_tell_nothing_and_are_not_counted():
    assert describe_company("GPU 3", []) is None
    assert describe_company("GPU 3", [SAMPLE]) is None
    assert "in 1 of 1 samples" in describe_company("GPU 3", [SAMPLE, replace(SAMPLE, process_count=2)])


@pytest.mark.parametrize("outcome", [Measured(figures={"loss": 1.0}), OutOfMemory(detail="refused")])
def test_figures_and_refusals_are_void_for_any_reason(outcome):
    assert judge(outcome, []) is outcome
    assert judge(outcome, ["one", "two"]) == Contaminated(detail="one; two")


@pytest.mark.parametrize("kind", [HostOutOfMemory, TimedOut, Crashed, Contaminated])
def test_other_failures_stay_what_they_are(kind):
    assert judge(kind(detail="d"), ["a reason"]) == kind(detail="d")


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (
            replace(FREE, used_bytes=3 * GIB),
            "GPU 3 is in use already: 3 GiB are taken (no process on it can be seen from here)",
        ),
        (
            replace(FREE, processes=(GpuProcess(pid=42, used_bytes=GIB // 4),)),
            "GPU 3 is in use already: 512 MiB are taken (pid 42: 256 MiB)",
        ),
        (
            replace(FREE, used_bytes=UNKNOWN, processes=(GpuProcess(pid=42, used_bytes=None),)),
            "GPU 3 is in use already: n/a are taken (pid 42: n/a)",
        ),
        (
            replace(FREE, used_bytes=3 * GIB, processes=UNKNOWN),
            "GPU 3 is in use already: 3 GiB are taken (by whom cannot",
        ),
    ],
)
def test_users_of_a_gpu_are_named(use, words):
    assert describe_other_users(use).startswith(words)


@pytest.mark.parametrize("use", [FREE, replace(FREE, used_bytes=UNKNOWN), replace(FREE, processes=UNKNOWN)])
def test_gpu_without_known_users_is_free(use):
    assert describe_other_users(use) is None


def test_limit_is_what_may_be_taken():
    assert describe_other_users(FREE, GIB // 2) is None
    assert describe_other_users(FREE, GIB // 2 - 1) is not None
