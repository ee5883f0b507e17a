import json
import subprocess
import sys

import pytest

from benchmarks.gpu.memory import SETTINGS, make_bars


def account(traced=1.0, corrected=1.0, predicted=100):
    return {
        "peak_bytes": 1000, "traced_peak_bytes": 1000 * traced, "corrected_peak_bytes": 1000 * corrected,
        "largest_rows": 100, "predicted_rows": predicted, "trials": [],
    }  # fmt: skip


def by_name(bars):
    return {bar.name.removeprefix("gpu_memory_"): bar for bar in bars}


def test_there_are_a_dozen_configurations_and_all_differ():
    names = [one.name for one in SETTINGS]
    assert len(set(names)) == len(names) >= 12


def test_errors_count_in_both_directions_and_only_too_many_rows_count_as_above():
    found = {"settings": {"a": account(0.98, 1.005, 90), "b": account(1.05, 0.99, 102)}, "held": {"steps": 2000}}
    bars = by_name(make_bars(found))
    assert bars["median_error_before_trials_share"].figure == pytest.approx(0.035)
    assert bars["worst_error_before_trials_share"].figure == pytest.approx(0.05)
    assert bars["median_error_after_trials_share"].figure == pytest.approx(0.0075)
    assert bars["predicted_rows_above_true_share"].figure == pytest.approx(0.02)
    assert bars["held_steps_count"].holds


def test_what_was_not_measured_leaves_its_bar_unmeasured():
    bars = make_bars({"settings": {"a": {"not measured": "no time left"}}})
    assert [bar.holds for bar in bars] == [None] * 5


@pytest.mark.soak
@pytest.mark.system
def test_the_benchmark_runs_in_small_on_a_cpu(tmp_path):
    file = tmp_path / "memory.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.memory", "--tiny", "--minutes", "0.7", "--json", str(file)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(file.read_text())
    measured = [one for one in found["settings"].values() if "peak_bytes" in one]
    assert measured, done.stderr
    for one in measured:
        assert one["corrected_peak_bytes"] == pytest.approx(one["peak_bytes"], rel=0.05)
        # In so small a budget the libraries' own memory, which the prediction can only assume, is up to a tenth.
        assert 0.75 * one["largest_rows"] <= one["predicted_rows"] <= 1.1 * one["largest_rows"]
    assert "gpu_memory_median_error_before_trials_share" in done.stdout
