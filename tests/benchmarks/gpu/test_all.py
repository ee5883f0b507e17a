"""The GPU check in small, on the CPU: for real once, and its keeping of time and failures with made-up stages."""

import json
import subprocess
import sys

import pytest

from autotune.core.outcome import Measured
from autotune.measure.clock import FakeClock
from autotune.measure.host import FakeHost
from autotune.measure.machine import FakeMachine
from autotune.measure.nvml import FakeGpuMonitor
from autotune.search.site import open_site
from benchmarks.gpu.all import REPORT_NAME, STAGES, run_check
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.sizes import TINY_ON_CPU, synthetic_manifest
from benchmarks.gpu.stages import Stage


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    out = tmp_path_factory.mktemp("check") / "out"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.all",
        "--out",
        str(out),
        "--minutes",
        "3",
        "--device",
        "cpu",
        "--tiny",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    return done, out


@pytest.mark.system
def test_every_stage_measures_on_a_cpu(checked):
    done, out = checked
    assert done.returncode == 0, done.stderr
    report = json.loads((out / REPORT_NAME).read_text())
    assert [(stage["name"], stage["status"]) for stage in report["stages"]] == [
        (name, "measured") for name in ("machine", "ceilings", "nvml", "probe", "train")
    ]
    assert report["finished"]


@pytest.mark.system
def test_figures_say_how_they_were_come_by(checked):
    _, out = checked
    report = json.loads((out / REPORT_NAME).read_text())
    figures = {figure["name"]: figure for stage in report["stages"] for figure in stage["figures"]}
    assert figures["matmul_fp32_flops_per_s"]["value"] > 1e9
    assert abs(figures["half_load_busy_share"]["value"] - 0.5) < 0.15
    feasible, refused = figures["tiny_budget_feasible_max_rows"], figures["tiny_budget_infeasible_min_rows"]
    assert refused["value"] == feasible["value"] + 1
    assert figures["tiny_budget_feasible_peak_predicted_bytes"]["label"] == "predicted"
    reading = figures["full_load_gpm_sm_utilisation_share"]
    assert (reading["label"], reading["value"]) == ("not measured", None)
    assert reading["reason"]


@pytest.mark.system
def test_the_results_are_few_flat_files(checked):
    _, out = checked
    files = list(out.iterdir())
    assert all(path.is_file() and path.stat().st_size < 16 * 2**20 for path in files)
    assert len(files) <= 6


class Server(FakeMachine):
    """A machine that needs no start."""

    versions: dict = {}  # noqa: RUF012 - never changed

    def start(self):
        """Run already."""


@pytest.fixture
def rig(tmp_path):
    monitor = FakeGpuMonitor(absent="no driver")
    host = FakeHost(versions={"torch": "2", "transformers": "5"})
    return Rig(
        site=open_site("cpu", tmp_path, host, monitor),
        monitor=monitor,
        make_machine=lambda: Server(lambda trial: Measured(figures={})),
        manifest=synthetic_manifest(100),
        sizes=TINY_ON_CPU,
        clock=FakeClock(),
        out=tmp_path,
        scratch=tmp_path / "scratch",
    )


def _stage(name, measure, least_s=1.0):
    return Stage(name=name, measure=measure, weight=1, least_s=least_s)


def _fine(rig, sheet, box):
    sheet.measured("x_s", 1.0)


def test_a_stage_that_fails_keeps_its_figures_and_the_next_goes_on(rig, tmp_path):
    def break_down(rig, sheet, box):
        sheet.measured("before_s", 2.0)
        raise ZeroDivisionError("broken")

    report = run_check(rig, (_stage("bad", break_down), _stage("good", _fine)), 100, tmp_path)
    bad, good = report.stages
    assert (bad.status, bad.figures[0].value, good.status) == ("failed", 2.0, "measured")
    assert "ZeroDivisionError: broken" in bad.reason
    assert "break_down" in bad.traceback_tail
    assert report.exit_code == 1


def test_a_stage_without_time_is_not_measured_and_says_so(rig, tmp_path):
    def take_long(rig, sheet, box):
        rig.clock.sleep(90)

    report = run_check(rig, (_stage("long", take_long), _stage("late", _fine, least_s=20)), 100, tmp_path)
    assert (report.stages[1].status, report.stages[1].reason) == ("not measured", "no time left")


def test_the_file_is_whole_after_every_stage(rig, tmp_path):
    seen = []

    def look(rig, sheet, box):
        seen.append([stage["status"] for stage in json.loads((tmp_path / REPORT_NAME).read_text())["stages"]])

    run_check(rig, (_stage("a", look), _stage("b", look)), 100, tmp_path)
    assert seen == [["not measured", "not measured"], ["measured", "not measured"]]


def test_a_check_that_measured_nothing_has_a_code_of_its_own(rig, tmp_path):
    def fail(rig, sheet, box):
        raise RuntimeError

    assert run_check(rig, (_stage("a", fail),), 100, tmp_path).exit_code == 2


def test_the_most_valuable_stages_come_first():
    assert [stage.name for stage in STAGES] == ["machine", "ceilings", "nvml", "probe", "train"]
