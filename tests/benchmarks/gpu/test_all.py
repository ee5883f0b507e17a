import json
import os
import subprocess
import sys
import threading

import pytest

from autotune.decide.surroundings import expected_on_cpu
from autotune.measure.clock import FakeClock
from benchmarks.gpu import all as check
from benchmarks.gpu import stages as stages_module
from benchmarks.gpu.results import NO_TIME, NOT_REACHED
from benchmarks.gpu.stages import Stage
from tests.benchmarks.gpu.rigs import facts, make_rig

NAMES = ["machine", "ceilings", "nvml", "probe", "same", "train"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The check itself, in small, as a user starts it."""
    out = tmp_path_factory.mktemp("check") / "out"
    command = [sys.executable, "-X", "importtime", "-m", "benchmarks.gpu.all", "--out", str(out)]
    # Threads that wait for others without spinning: whatever else runs here costs then a share of the time, not most.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*command, "--device", "cpu", "--tiny", "--minutes", "5"],
        capture_output=True,
        text=True,
        timeout=320,
        env=environment,
        check=False,
    )
    return done, out, json.loads((out / check.REPORT_NAME).read_text())


def by_name(report: dict, stage: str) -> dict[str, dict]:
    (found,) = (one for one in report["stages"] if one["name"] == stage)
    return {figure["name"]: figure for figure in found["figures"]}


@pytest.mark.slow
@pytest.mark.system
def test_every_stage_measures_on_a_cpu(tiny):
    done, _, report = tiny
    assert [(stage["name"], stage["status"]) for stage in report["stages"]] == [(name, "measured") for name in NAMES]
    assert done.returncode == 0, done.stderr
    assert report["finished"]
    assert (report["schema_version"], report["device"], report["sizes"]) == (1, "cpu", "tiny")


@pytest.mark.slow
@pytest.mark.system
def test_files_are_few_and_flat(tiny):
    _, out, _ = tiny
    assert sorted(path.name for path in out.iterdir()) == ["gpu-check.json", "ledger.jsonl"]
    assert all(path.is_file() and path.stat().st_size < 2**20 for path in out.iterdir())


@pytest.mark.slow
@pytest.mark.system
def test_rates_and_loads_are_measured(tiny):
    report = tiny[2]
    ceilings, nvml = by_name(report, "ceilings"), by_name(report, "nvml")
    assert ceilings["matmul_fp32_flops_per_s"]["value"] > 1e6
    assert ceilings["copy_read_plus_write_bytes_per_s"]["value"] > 1e6
    assert nvml["full_load_busy_share"]["expected"] == 1.0
    assert nvml["half_load_busy_share"]["expected"] == 0.5
    assert nvml["half_load_busy_share"]["value"] == pytest.approx(0.5, abs=0.15)
    assert nvml["full_load_busy_share"]["value"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.system
def test_readings_without_a_gpu_are_not_measured_and_say_why(tiny):
    for load in ("idle", "full_load", "half_load"):
        for reading in ("nvml_utilisation_share", "gpm_sm_utilisation_share"):
            figure = by_name(tiny[2], "nvml")[f"{load}_{reading}"]
            assert (figure["label"], figure["value"]) == ("not measured", None)
            assert figure["reason"]


@pytest.mark.slow
@pytest.mark.system
def test_probe_finds_a_largest_size_with_a_prediction_beside_it(tiny):
    probe = by_name(tiny[2], "probe")
    feasible = probe["tiny_budget_feasible_max_rows"]["value"]
    assert feasible >= 1
    assert probe["tiny_budget_infeasible_min_rows"]["value"] == feasible + 1
    assert probe["tiny_budget_feasible_peak_traced_bytes"]["label"] == "predicted"
    measured = probe["tiny_budget_feasible_peak_bytes"]["value"]
    predicted = probe["tiny_budget_feasible_peak_traced_bytes"]["value"]
    libraries = expected_on_cpu()
    traced = predicted - libraries.usual.outside_bytes
    least, most = (traced + one.outside_bytes for one in (libraries.least, libraries.most))
    assert 0.98 * least <= measured <= 1.02 * most
    assert probe["tiny_budget_best_slot_tokens_per_s"]["value"] > 0


@pytest.mark.slow
@pytest.mark.system
def test_training_has_its_step_time_and_memory(tiny):
    train = by_name(tiny[2], "train")
    assert train["slot_tokens_per_s"]["value"] > 0
    assert train["step_median_s"]["value"] > 0
    assert train["peak_bytes"]["value"] > 2**20


@pytest.mark.slow
@pytest.mark.system
def test_the_ledger_holds_every_trial(tiny):
    _, out, report = tiny
    records = [json.loads(line)["record"] for line in (out / "ledger.jsonl").read_text().splitlines()]
    assert [record["job"] for record in records].count("matmul") == 3
    probed = by_name(report, "probe")["tiny_budget_trials_count"]["value"]
    assert [record["job"] for record in records].count("step") == probed + 1


@pytest.mark.slow
@pytest.mark.system
def test_the_check_itself_imports_no_heavy_library(tiny):
    done = tiny[0]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "benchmarks.gpu.rig" in imported
    assert not imported & {"torch", "transformers", "optuna", "tomlkit", "typer", "rich"}


@pytest.mark.slow
@pytest.mark.system
def test_the_table_is_printed_last_and_places_are_kept_out_of_the_file(tiny):
    done, out, _ = tiny
    assert done.stdout.splitlines()[0].split() == ["stage", "figure", "label", "value", "expected"]
    assert done.stdout.splitlines()[-1].startswith("written: ")
    assert str(out) not in (out / check.REPORT_NAME).read_text()


def stage(name: str, measure, least_s: float = 1.0) -> Stage:
    return Stage(name=name, measure=measure, weight=1, least_s=least_s)


def one_figure(rig, sheet, box):
    sheet.measured("something_count", 1)


def broken(rig, sheet, box):
    sheet.measured("before_count", 1)
    raise ValueError("broken on purpose")


def no_trial(trial):
    raise AssertionError("no trial was expected")


def written(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / check.REPORT_NAME).read_text())


def test_a_failing_stage_is_recorded_and_the_next_goes_on(tmp_path):
    table = (stage("first", broken), stage("second", one_figure))
    report = check.run_check(make_rig(tmp_path, no_trial), table, 60, tmp_path / "out")
    first, second = written(tmp_path)["stages"]
    assert (first["status"], first["reason"]) == ("failed", "ValueError: broken on purpose")
    assert "ValueError: broken on purpose" in first["traceback_tail"]
    assert str(check.Path(__file__).parents[3]) not in first["traceback_tail"]
    assert [figure["name"] for figure in first["figures"]] == ["before_count"]
    assert second["status"] == "measured"
    assert report.exit_code == 1


def test_a_stage_without_time_is_not_measured(tmp_path):
    table = (stage("first", one_figure), stage("second", one_figure, least_s=1000.0))
    report = check.run_check(make_rig(tmp_path, no_trial), table, 60, tmp_path / "out")
    second = written(tmp_path)["stages"][1]
    assert (second["status"], second["reason"]) == ("not measured", NO_TIME)
    assert report.exit_code == 1


def test_a_stage_that_takes_all_the_time_leaves_none_to_the_next(tmp_path):
    clock = FakeClock()
    table = (stage("long", lambda *_: clock.sleep(90)), stage("late", one_figure, least_s=20.0))
    report = check.run_check(make_rig(tmp_path, no_trial, clock=clock), table, 100, tmp_path / "out")
    assert [(one.status, one.reason) for one in report.stages] == [("measured", None), ("not measured", NO_TIME)]


def test_nothing_measured_at_all_is_code_2(tmp_path):
    report = check.run_check(make_rig(tmp_path, no_trial), (stage("only", broken),), 60, tmp_path / "out")
    assert report.exit_code == 2


def test_the_report_is_whole_while_a_stage_runs(tmp_path):
    seen = []

    def look(rig, sheet, box):
        seen.append(written(tmp_path))

    table = (stage("first", look), stage("second", look))
    check.run_check(make_rig(tmp_path, no_trial), table, 60, tmp_path / "out")
    assert [[one["status"] for one in report["stages"]] for report in seen] == [
        ["not measured", "not measured"],
        ["measured", "not measured"],
    ]
    assert seen[0]["stages"][1]["reason"] == NOT_REACHED
    assert not seen[1]["finished"]
    assert written(tmp_path)["finished"]


def test_a_stage_that_hangs_costs_its_box_and_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(stages_module, "HANG_ALLOWANCE_S", 0.1)
    release = threading.Event()
    rig = make_rig(tmp_path, no_trial)
    hung_machine = rig.machine
    table = (stage("first", lambda *_: release.wait(60), least_s=0.0), stage("second", one_figure, least_s=0.0))
    report = check.run_check(rig, table, 1, tmp_path / "out")
    release.set()
    assert [one.status for one in report.stages] == ["failed", "measured"]
    assert "did not return" in report.stages[0].reason
    assert hung_machine.closed
    assert rig.machine is not hung_machine


def test_time_that_a_stage_leaves_goes_to_the_next_ones(tmp_path):
    clock = FakeClock()
    boxes = []

    def brief(rig, sheet, box):
        boxes.append(box.left_s)
        clock.sleep(1.0)

    table = (stage("a", brief), stage("b", brief), stage("c", brief))
    check.run_check(make_rig(tmp_path, no_trial, clock=clock), table, 100, tmp_path / "out")
    assert boxes == pytest.approx([95 / 3, 94 / 2, 93])


def test_a_torch_without_cuda_on_a_gpu_machine_is_said_at_once(tmp_path):
    rig = make_rig(tmp_path, no_trial, gpu=facts())
    rig.machine.versions["cuda"] = None
    report = check.run_check(rig, check.STAGES[:1], 60, tmp_path / "out")
    assert report.stages[0].status == "failed"
    assert "without CUDA" in report.stages[0].reason
    assert {figure.name: figure.value for figure in report.stages[0].figures}["gpu_power_cap_w"] == 700.0


def test_asking_for_a_gpu_where_there_is_none_is_code_2(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.all", "--out", str(tmp_path / "out"), "--device", "cuda"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 2
    assert "there is no GPU here" in done.stderr
