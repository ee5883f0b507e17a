import time

import pytest

from autotune.core.outcome import Crashed, Measured
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, TimeBox, TrialFailed
from benchmarks.gpu.stage import load
from tests.benchmarks.gpu.rigs import facts, make_rig


def loaded(trial):
    """A load of 1.2 s that reaches half of what it was asked for."""
    start_s = time.monotonic()
    time.sleep(1.2)
    return Measured(
        figures={
            "flops_per_s": 7e14,
            "copy_bytes_per_s": 4e12,
            "busy_share": trial.measured["duty_share"] / 2,
            "window_start_s": start_s,
            "window_end_s": time.monotonic(),
        }
    )


def box(rig, seconds: float = 60) -> TimeBox:
    return TimeBox(clock=rig.clock, end_s=rig.clock.monotonic_s() + seconds)


def test_readings_stand_beside_the_load_that_was_achieved(tmp_path):
    rig = make_rig(tmp_path, loaded, gpu=facts())
    sheet = Sheet()
    load.measure_nvml(rig, sheet, box(rig))
    figures = {figure.name: figure for figure in sheet.figures}
    utilisation = figures["full_load_nvml_utilisation_share"]
    assert (utilisation.label, utilisation.value, utilisation.expected) == ("measured", 0.75, 0.5)
    assert figures["half_load_gpm_sm_utilisation_share"].value == pytest.approx(0.7)
    assert figures["half_load_gpm_sm_utilisation_share"].expected == 0.25
    assert figures["idle_nvml_utilisation_share"].expected == 0.0
    assert figures["full_load_gpm_tensor_active_share"].expected is None
    # A counter that the driver does not give is missing on its own.
    assert figures["full_load_gpm_dram_active_share"].label == "not measured"
    assert sheet.details["full_load_readings"]["throttle_reasons"] == ["sw_power_cap"]


def test_readings_lie_within_the_load_and_after_its_ramp(tmp_path):
    rig = make_rig(tmp_path, loaded, gpu=facts())
    sheet = Sheet()
    load.measure_nvml(rig, sheet, box(rig))
    details, window = sheet.details["full_load_readings"], sheet.details["full_load"]
    assert details["start_s"] == window["window_start_s"] + rig.sizes.settle_s
    times_s = [sample["time_s"] for sample in details["nvml_samples"]]
    times_s += [one["start_s"] for one in details["gpm_windows"]] + [one["end_s"] for one in details["gpm_windows"]]
    assert times_s
    assert all(details["start_s"] <= moment_s <= window["window_end_s"] for moment_s in times_s)


def test_a_load_that_fails_fails_the_stage(tmp_path):
    rig = make_rig(tmp_path, lambda trial: Crashed(detail="no such kernel"), gpu=facts())
    with pytest.raises(TrialFailed, match="no such kernel"):
        load.measure_ceilings(rig, Sheet(), box(rig))


def test_without_time_no_trial_starts(tmp_path):
    rig = make_rig(tmp_path, loaded, gpu=facts())
    with pytest.raises(NoTimeLeft):
        load.measure_ceilings(rig, Sheet(), box(rig, seconds=1))
    assert rig.machine.trials == []  # type: ignore[attr-defined]
