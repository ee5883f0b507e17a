"""Disturbances of a GPU that discard a trial's outcome, and their descriptions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.trials.decide.contamination import (
    MEMORY_TOLERANCE_BYTES,
    describe_growth,
    describe_other_processes,
    describe_other_users,
    describe_slowdown,
    discard_if_disturbed,
    is_above_baseline,
)
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    OutOfMemory,
    TimedOut,
)
from testbed.fakes import SAMPLE
from trainer.formats.gpus import GpuProcess, Unavailable

GIB = 2**30
UNKNOWN = Unavailable(reason="NVML: Insufficient Permissions")
HOLDER = GpuProcess(pid=42, used_bytes=GIB // 4)
HOLDER_OF_UNKNOWN_SIZE = GpuProcess(pid=7, used_bytes=None)
SIZES_BYTES = st.integers(0, 200 * GIB)


@given(baseline_bytes=SIZES_BYTES, growth_bytes=st.integers(-GIB, GIB))
def test_growth_beyond_tolerance_is_above_baseline(baseline_bytes, growth_bytes):
    is_above = is_above_baseline(baseline_bytes, baseline_bytes + growth_bytes)
    assert is_above == (growth_bytes > MEMORY_TOLERANCE_BYTES)


@given(size_bytes=SIZES_BYTES)
def test_unknown_memory_is_never_above_baseline(size_bytes):
    assert not is_above_baseline(UNKNOWN, size_bytes)
    assert not is_above_baseline(size_bytes, UNKNOWN)


def test_growth_names_the_holders():
    description = describe_growth(
        "GPU 3",
        used_bytes=int(3.5 * GIB),
        holders=(HOLDER, HOLDER_OF_UNKNOWN_SIZE),
        baseline_bytes=GIB // 2,
        waited_s=30.0,
    )
    assert description == (
        "GPU 3 still holds 3.5 GiB after a wait of 30 s, up from 512 MiB before the"
        " first trial (pid 42: 256 MiB, pid 7: n/a)"
    )


# Reasons for a lower clock in one sample.
CAPPED = ("sw_power_cap",)
HOT = ("hw_thermal",)
HOT_AND_SLOW = ("hw_slowdown", "hw_thermal")
FINE = ()
UNREAD = None
"""The driver could not be asked for reasons."""


def samples_with(*throttle_reasons):
    """Return a sample at 91 °C for each of these values of ``throttle_reasons``."""
    return [
        replace(SAMPLE, throttle_reasons=reasons, temperature_c=91)
        for reasons in throttle_reasons
    ]


def samples_at_cap_with(fault):
    """Return samples of a GPU at its power cap, two of three with a fault."""
    return samples_with((*CAPPED, fault), FINE, (*CAPPED, fault))


def without_temperature(samples):
    return [replace(sample, temperature_c=None) for sample in samples]


lasting_faults = pytest.mark.parametrize(
    ("samples", "faults"),
    [
        pytest.param(
            samples_at_cap_with("hw_slowdown"),
            "hw_slowdown in 2 of 3 samples",
            id="hardware slowdown",
        ),
        pytest.param(
            samples_at_cap_with("sw_thermal"),
            "sw_thermal in 2 of 3 samples",
            id="heat, by the driver",
        ),
        pytest.param(
            samples_at_cap_with("hw_thermal"),
            "hw_thermal in 2 of 3 samples",
            id="heat, by the hardware",
        ),
        pytest.param(
            samples_at_cap_with("hw_power_brake"),
            "hw_power_brake in 2 of 3 samples",
            id="power brake",
        ),
        pytest.param(
            samples_with(HOT_AND_SLOW, HOT_AND_SLOW, HOT),
            "hw_slowdown in 2 of 3 samples, hw_thermal in 3 of 3 samples",
            id="two faults",
        ),
        pytest.param(
            samples_with(HOT, UNREAD, HOT),
            "hw_thermal in 2 of 2 samples",
            id="in all samples that were read",
        ),
        pytest.param(
            samples_with(HOT), "hw_thermal in 1 of 1 samples", id="in the only sample"
        ),
        pytest.param(
            samples_with(*[HOT] * 3, *[FINE] * 17, *[UNREAD] * 20),
            "hw_thermal in 3 of 20 samples",
            id="in more than a tenth of the samples that were read",
        ),
    ],
)


@lasting_faults
def test_heat_or_hardware_slowdown_is_a_fault(samples, faults):
    assert describe_slowdown("GPU 3", samples) == (
        f"GPU 3 was slowed down: {faults}, at up to 91 °C"
    )


@lasting_faults
def test_fault_at_unknown_temperature_is_described(samples, faults):
    assert describe_slowdown("GPU 3", without_temperature(samples)) == (
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
    assert describe_slowdown("GPU 3", samples) is None
    assert describe_slowdown("GPU 3", without_temperature(samples)) is None


@pytest.mark.parametrize(
    ("process_counts", "description"),
    [
        pytest.param(
            (1, 3, 1),
            "another process used GPU 3: 3 processes in 1 of 3 samples",
            id="two others beside the trial's own",
        ),
        pytest.param(
            (None, 2),
            "another process used GPU 3: 2 processes in 1 of 1 samples",
            id="one sample not read",
        ),
        pytest.param((1, 0), None, id="the trial's own only"),
        pytest.param((None,), None, id="never read"),
        pytest.param((), None, id="no samples"),
    ],
)
def test_only_processes_of_others_are_described(process_counts, description):
    samples = [replace(SAMPLE, process_count=count) for count in process_counts]
    assert describe_other_processes("GPU 3", samples) == description


FIGURES = Measured(figures={"loss": 1.0})
OUT_OF_MEMORY = OutOfMemory(detail="d")
OTHER_FAILURES = [
    kind(detail="d") for kind in (HostOutOfMemory, TimedOut, Crashed, Contaminated)
]


@pytest.mark.parametrize(
    "outcome", [FIGURES, OUT_OF_MEMORY], ids=lambda outcome: outcome.kind
)
def test_reasons_discard_figures_or_out_of_memory(outcome):
    assert discard_if_disturbed(outcome, ["one", "two"]) == Contaminated(
        detail="one; two"
    )


@pytest.mark.parametrize("outcome", OTHER_FAILURES, ids=lambda outcome: outcome.kind)
def test_other_failures_stay_for_any_reason(outcome):
    assert discard_if_disturbed(outcome, ["one", "two"]) is outcome


@pytest.mark.parametrize(
    "outcome",
    [FIGURES, OUT_OF_MEMORY, *OTHER_FAILURES],
    ids=lambda outcome: outcome.kind,
)
def test_outcome_stays_without_a_reason(outcome):
    assert discard_if_disturbed(outcome, []) is outcome


@pytest.mark.parametrize(
    ("used_bytes", "holders", "use"),
    [
        pytest.param(
            3 * GIB,
            (),
            "3 GiB allocated (no visible process, perhaps another user's)",
            id="hidden process",
        ),
        pytest.param(
            2 * GIB + 1,
            (),
            "2 GiB allocated (no visible process, perhaps another user's)",
            id="a byte beyond the driver's reserve",
        ),
        pytest.param(
            GIB // 2,
            (HOLDER,),
            "512 MiB allocated (pid 42: 256 MiB)",
            id="listed process",
        ),
        pytest.param(
            UNKNOWN,
            (HOLDER_OF_UNKNOWN_SIZE,),
            "n/a allocated (pid 7: n/a)",
            id="sizes unknown",
        ),
        pytest.param(
            3 * GIB,
            UNKNOWN,
            "3 GiB allocated"
            " (processes cannot be listed: NVML: Insufficient Permissions)",
            id="processes unknown",
        ),
    ],
)
def test_describes_users_of_a_gpu(used_bytes, holders, use):
    description = describe_other_users("GPU 3", used_bytes, holders)
    assert description == f"GPU 3 is already in use: {use}"


@pytest.mark.parametrize(
    ("used_bytes", "holders"),
    [
        pytest.param(GIB // 2, (), id="less than the reserve"),
        pytest.param(2 * GIB, (), id="the whole reserve"),
        pytest.param(UNKNOWN, (), id="size unknown"),
        pytest.param(GIB // 2, UNKNOWN, id="processes unknown"),
    ],
)
def test_gpu_with_only_the_drivers_reserve_is_free(used_bytes, holders):
    assert describe_other_users("GPU 3", used_bytes, holders) is None
