from dataclasses import replace

import pytest

from autotune.core.outcome import Crashed, Measured, OutOfMemory, TimedOut
from autotune.errors import Undecided
from autotune.measure.clock import FakeClock
from benchmarks.gpu import probe
from benchmarks.gpu.results import Sheet
from benchmarks.gpu.rig import NoTimeLeft, TimeBox
from benchmarks.gpu.sizes import FULL, H100_NVL_TOTAL_BYTES
from tests.benchmarks.gpu.rigs import facts, make_rig

ROW_BYTES, FIXED_BYTES, TRIAL_S = 300 * 2**20, 4 * 2**30, 5.0


def card(clock: FakeClock, trial_s: float = TRIAL_S):
    """A GPU on which a row takes 300 MiB, and a trial some seconds."""

    def simulate(trial):
        if trial.job == "trace":
            return Crashed(detail="there is no model here")
        if trial.timeout_s < trial_s:
            clock.sleep(trial.timeout_s)
            return TimedOut(detail="late")
        clock.sleep(trial_s)
        rows = trial.measured["config"]["micro_batch_rows"]
        peak_bytes = FIXED_BYTES + rows * ROW_BYTES
        if peak_bytes > trial.measured["memory_budget_bytes"]:
            return OutOfMemory(detail="refused")
        figures = {"optimizer_steps": 5, "step_s": [rows / 100], "slot_tokens_per_step": rows * 512}
        return Measured(figures=figures | {"peak_bytes": peak_bytes, "outside_allocator_bytes": 2**29, "loss": 10.0})

    return simulate


def probed(tmp_path, *, seconds: float, total_bytes: int = 143_771 * 2**20):
    clock = FakeClock()
    rig = make_rig(tmp_path, card(clock), gpu=facts(total_bytes), sizes=FULL, clock=clock)
    sheet = Sheet()
    error = None
    try:
        probe.measure(rig, sheet, TimeBox(clock=clock, end_s=clock.monotonic_s() + seconds))
    except NoTimeLeft as no_time:
        error = no_time
    return {figure.name: figure for figure in sheet.figures}, sheet.details, error


def test_a_larger_card_is_probed_as_itself_and_as_an_h100_nvl(tmp_path):
    figures, details, error = probed(tmp_path, seconds=600)
    assert error is None
    for name, budget_bytes in (
        ("whole_device", 143_771 * 2**20 - 2**29),
        ("as_h100_nvl", H100_NVL_TOTAL_BYTES),
    ):
        rows = (budget_bytes - FIXED_BYTES) // ROW_BYTES
        assert details[name]["memory_budget_bytes"] == budget_bytes
        assert figures[f"{name}_feasible_max_rows"].value == rows
        assert figures[f"{name}_infeasible_min_rows"].value == rows + 1
        peak = figures[f"{name}_feasible_peak_bytes"]
        assert peak.value == FIXED_BYTES + rows * ROW_BYTES
        assert peak.expected == pytest.approx(peak.value, rel=1e-3)
        assert figures[f"{name}_feasible_peak_predicted_bytes"].label == "predicted"
        assert details[name]["complete"]


def test_a_smaller_card_is_probed_once(tmp_path):
    _, details, _ = probed(tmp_path, seconds=600, total_bytes=80 * 2**30)
    assert list(details) == ["whole_device"]


def test_what_was_found_before_the_time_ran_out_is_kept(tmp_path):
    figures, details, error = probed(tmp_path, seconds=45, total_bytes=80 * 2**30)
    assert error is not None
    assert figures["whole_device_feasible_max_rows"].value == (80 * 2**30 - 2**29 - FIXED_BYTES) // ROW_BYTES
    assert figures["whole_device_best_slot_tokens_per_s"].label == "not measured"
    assert not details["whole_device"]["complete"]


def test_a_first_budget_that_takes_too_long_leaves_time_for_the_second(tmp_path):
    figures, _, error = probed(tmp_path, seconds=60)
    assert error is not None
    assert figures["as_h100_nvl_trials_count"].value >= 1


def test_a_crash_fails_the_stage(tmp_path):
    clock = FakeClock()
    rig = make_rig(tmp_path, lambda trial: Crashed(detail="broken"), gpu=facts(), sizes=FULL, clock=clock)
    with pytest.raises(Undecided, match="broken"):
        probe.measure(rig, Sheet(), TimeBox(clock=clock, end_s=clock.monotonic_s() + 600))


def test_tiny_sizes_have_a_budget_of_their_own(tmp_path):
    rig = make_rig(tmp_path, lambda trial: Crashed(detail="not run"))
    assert probe.memory_budgets(rig) == {"tiny_budget": rig.sizes.probe_budget_bytes}
    whole = make_rig(tmp_path / "b", lambda trial: Crashed(detail=""), sizes=replace(FULL, name="full"))
    assert list(probe.memory_budgets(whole)) == ["whole_device"]
