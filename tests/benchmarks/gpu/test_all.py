import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
import zipfile

import psutil
import pytest

from autotune.core.outcome import Measured
from autotune.core.trial import Trial
from benchmarks.gpu import all as check
from benchmarks.gpu.check import page
from benchmarks.gpu.check import stages as stages_module
from benchmarks.gpu.check.results import NO_TIME, NOT_REACHED, CheckReport
from benchmarks.gpu.check.rig import NoTimeLeft
from benchmarks.gpu.check.sizes import FULL
from benchmarks.gpu.check.stages import Stage, box_s
from tests.benchmarks.gpu.rigs import facts, make_rig
from tests.fakes import FakeClock

NAMES = [stage.name for stage in check.STAGES]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The check itself, in small, as a user starts it."""
    out = tmp_path_factory.mktemp("check") / "out"
    command = [sys.executable, "-X", "importtime", "-m", "benchmarks.gpu.all", "--out", str(out)]
    # Threads that wait for others without spinning: whatever else runs here costs then a share of the time, not most.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [*command, "--device", "cpu", "--tiny", "--minutes", "10", "--nproc", "2"],
        capture_output=True,
        text=True,
        timeout=660,
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
    assert (report["schema_version"], report["device"], report["sizes"]) == (3, "cpu", "tiny")


@pytest.mark.slow
@pytest.mark.system
def test_files_are_few_and_flat(tiny):
    _, out, _ = tiny
    names = sorted(path.name for path in out.iterdir())
    assert names == ["gpu-check.html", "gpu-check.json", "ledger.jsonl", "tune.zip"]
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
def test_largest_micro_batches_are_found_with_a_prediction_beside_them(tiny):
    memory = by_name(tiny[2], "memory")
    assert memory["configurations_count"]["value"] == 2
    for style in ("tuned", "paper_style"):
        largest = memory[f"{style}_bert_mini_largest_rows_count"]
        # In so small a budget the libraries' own memory, which the prediction can only assume, is up to a third.
        assert 0.6 * largest["value"] <= largest["expected"] <= 1.2 * largest["value"]
    assert memory["median_error_after_calibration_share"]["value"] < 0.02
    (settings,) = (stage["details"]["settings"] for stage in tiny[2]["stages"] if stage["name"] == "memory")
    for one in settings.values():
        fits = {rows: fit for rows, fit, _ in one["trials"]}
        assert fits[one["largest_rows"]]
        assert fits[one["largest_rows"] + 1] is False


@pytest.mark.slow
@pytest.mark.system
def test_training_is_compared_and_taken_apart(tiny):
    train = by_name(tiny[2], "train")
    for model in ("bert_120m", "bert_350m"):
        assert train[f"{model}_real_tokens_per_s"]["value"] > 0
        assert train[f"{model}_mfu_share"]["label"] == "not measured"
    assert train["against_paper_style_ratio"]["value"] > 1
    assert train["against_hf_trainer_ratio"]["value"] > 0
    assert len([name for name in train if name.endswith("_of_everything_share")]) == 8


@pytest.mark.slow
@pytest.mark.system
def test_fast_ways_compute_what_plain_ones_do(tiny):
    maths = {name: figure["value"] for name, figure in by_name(tiny[2], "maths").items()}
    assert maths["kernels_varlen_whole_last_layer_distance_share"] < 1e-5
    assert maths["layouts_fp32_tokens_count"] > 100
    assert maths["layouts_fp32_largest_loss_difference_nats"] < 1e-4
    assert maths["documents_varlen_largest_change_of_others"] == 0
    assert maths["documents_varlen_least_change_of_itself"] > 1e-3
    assert 0 < maths["compiled_distance_share"] < 1e-4
    assert maths["waits_recompilations_count"] == 0


@pytest.mark.slow
@pytest.mark.system
def test_loaders_are_swept_for_both_datasets(tiny):
    workers = by_name(tiny[2], "workers")
    assert workers["fast_dataset_data_wait_share"]["value"] < 0.2
    assert workers["slow_dataset_windows_count"]["value"] > workers["slow_dataset_workers_count"]["value"]
    assert workers["fast_dataset_gpm_sm_share"]["label"] == "not measured"


@pytest.mark.slow
@pytest.mark.system
def test_a_whole_tuning_leaves_profile_and_report_in_one_archive(tiny):
    _, out, report = tiny
    tune = by_name(report, "tune")
    assert tune["profiles_count"]["value"] == tune["profiles_count"]["expected"] == 1
    assert tune["commands_s"]["value"] > 0
    assert (tune["all_models_s"]["label"] == "measured") == (tune["chosen_data_wait_share"]["label"] == "measured")
    with zipfile.ZipFile(out / "tune.zip") as packed:
        names = set(packed.namelist())
        profile = tomllib.loads(packed.read("profiles/bert-mini-cpu.toml").decode())
    assert {"reports/bert-mini-cpu/report.html", "reports/bert-mini-cpu/report.json"} <= names
    assert profile["train"]["micro_batch_rows"] == tune["bert_mini_cpu_micro_batch_rows_count"]["value"]
    assert "gpu-check-" not in profile["provenance"].get("command", "")


@pytest.mark.slow
@pytest.mark.system
def test_the_largest_micro_batch_keeps_fitting_and_saves_cost_little(tiny):
    endurance, saves = by_name(tiny[2], "endurance"), by_name(tiny[2], "saves")
    assert endurance["steps_without_retry_count"]["value"] >= 30
    assert endurance["peak_bytes"]["value"] > 0
    assert saves["state_bytes"]["value"] > 2**20
    assert saves["synchronous_save_s"]["value"] > 0


@pytest.mark.slow
@pytest.mark.system
def test_two_ranks_step_together_and_one_that_runs_out_of_memory_is_named(tiny):
    ranks = by_name(tiny[2], "ranks")
    assert ranks["ranks_count"]["value"] == 2
    assert ranks["one_rank_out_of_memory_named_count"]["value"] == 1
    assert ranks["link_bytes_per_s"]["value"] > 1e6
    assert ranks["communication_outside_allocator_bytes"]["label"] == "not measured"


@pytest.mark.slow
@pytest.mark.system
def test_the_ledger_holds_every_trial_of_its_own(tiny):
    _, out, _ = tiny
    records = [json.loads(line)["record"] for line in (out / "ledger.jsonl").read_text().splitlines()]
    jobs = {record["job"] for record in records}
    assert {"matmul", "step", "feed", "links"} <= jobs
    assert [record["job"] for record in records].count("matmul") == 3


@pytest.mark.slow
@pytest.mark.system
def test_the_check_itself_imports_no_heavy_library(tiny):
    done = tiny[0]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "benchmarks.gpu.check.rig" in imported
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
    report = check.run_check(make_rig(tmp_path, no_trial, sizes=FULL), table, 60, tmp_path / "out")
    second = written(tmp_path)["stages"][1]
    assert (second["status"], second["reason"]) == ("not measured", f"{NO_TIME}: it takes 16 min 40 s at least")
    assert report.exit_code == 1


def test_a_stage_that_takes_all_the_time_leaves_none_to_the_next(tmp_path):
    clock = FakeClock()
    table = (stage("long", lambda *_: clock.sleep(90)), stage("late", one_figure, least_s=20.0))
    rig = make_rig(tmp_path, no_trial, clock=clock, sizes=FULL)
    report = check.run_check(rig, table, 100, tmp_path / "out")
    assert [one.status for one in report.stages] == ["measured", "not measured"]
    assert report.stages[1].reason == f"{NO_TIME}: it takes 20 s at least"


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


@pytest.mark.slow
@pytest.mark.parametrize(("how", "left"), [(signal.SIGTERM, False), (signal.SIGKILL, True)], ids=["TERM", "KILL"])
def test_a_check_that_is_ended_leaves_no_process_and_one_that_may_tidy_up_no_file(how, left, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "benchmarks.gpu.all", "--device", "cpu", "--tiny", "--minutes", "3"]
    process = subprocess.Popen(
        [*command, "--only", "maths", "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    assert process.stderr is not None
    assert any(line.strip() == "kernels" for line in process.stderr)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(how)
    process.stderr.read()
    assert process.wait(timeout=30) == (-how if left else 130)
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert bool(list(scratch.iterdir())) == left


def named(*names: str) -> tuple[Stage, ...]:
    return tuple(stage(name, one_figure) for name in names)


def statuses(report) -> dict[str, str]:
    return {one.name: one.status for one in report.stages}


def test_stages_that_are_left_out_stay_as_an_earlier_check_left_them(tmp_path):
    rig, table, out = make_rig(tmp_path, no_trial), named("a", "b", "c"), tmp_path / "out"
    first = check.run_check(rig, table, 60, out, only=["a"])
    assert statuses(first) == {"a": "measured", "b": "not asked for", "c": "not asked for"}
    assert first.exit_code == 0
    second = check.run_check(rig, table, 60, out, only=["b"])
    assert statuses(second) == {"a": "measured", "b": "measured", "c": "not asked for"}
    assert written(tmp_path)["stages"][0]["figures"][0]["name"] == "something_count"
    again = check.run_check(rig, (stage("a", broken), *table[1:]), 60, out, only=["a"])
    assert statuses(again) == {"a": "failed", "b": "measured", "c": "not asked for"}


def test_a_stage_that_was_cut_off_is_known_to_the_next_check_and_lost_by_none(tmp_path):
    out, seen = tmp_path / "out", []

    def cut_off(rig, sheet, box):
        sheet.details["had"] = [1]
        raise NoTimeLeft("no time left")

    def look(rig, sheet, box):
        seen.append((rig.go_on("a", sheet), written(tmp_path)["stages"][0]["details"], sheet.details))

    rigs = [make_rig(tmp_path / str(number), no_trial, sizes=FULL) for number in range(4)]
    first = check.run_check(rigs[0], (stage("a", cut_off),), 60, out)
    begun = first.stages[0].measured_utc
    late = check.run_check(rigs[1], (stage("a", look, least_s=1000.0),), 60, out)
    assert late.stages == first.stages  # it was not begun, so what there was stays
    again = check.run_check(rigs[2], (stage("a", look),), 60, out)
    assert seen == [(first.stages[0], {"had": [1]}, {"gone_on_from_utc": [begun]})]
    assert statuses(again) == {"a": "measured"}
    check.run_check(rigs[3], (stage("a", look),), 60, out)
    assert seen[1][0] is None  # what was whole is measured anew


def test_trials_of_earlier_checks_stay_in_the_ledger(tmp_path):
    def tries(name):
        def measure(rig, sheet, box):
            rig.figures(Trial(job="matmul", measured={"purpose": name}, timeout_s=10), name, box)

        return measure

    def one_trial(trial):
        return Measured(figures={"busy_share": 1.0})

    out, table = tmp_path / "out", (stage("a", tries("a")), stage("b", tries("b")))
    for number, name in enumerate("ab"):
        rig = make_rig(tmp_path / name, one_trial)
        rig.out = out
        check.run_check(rig, table, 60, out, only=[name])
        lines = (out / "ledger.jsonl").read_text().splitlines()
        assert [json.loads(line)["record"]["measured"]["purpose"] for line in lines] == ["a", "b"][: number + 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_not_measured_and_costs_nothing_else(value, tmp_path):
    def odd(rig, sheet, box):
        sheet.measured("distance_share", value)
        sheet.details["deep"] = [{"distance": value}]

    rig = make_rig(tmp_path, no_trial)
    report = check.run_check(rig, (stage("a", odd), stage("b", one_figure)), 60, tmp_path / "out")
    assert statuses(report) == {"a": "measured", "b": "measured"}
    first = written(tmp_path)["stages"][0]
    assert (first["figures"][0]["label"], first["figures"][0]["reason"]) == ("not measured", f"it is {value}")
    assert first["details"]["deep"] == [{"distance": str(value)}]


def test_a_page_that_cannot_be_written_costs_no_stage(tmp_path, monkeypatch, capsys):
    def broken_page(report):
        raise KeyError("unforeseen")

    monkeypatch.setattr(page, "check_page", broken_page)
    report = check.run_check(make_rig(tmp_path, no_trial), named("a", "b"), 60, tmp_path / "out")
    assert statuses(report) == {"a": "measured", "b": "measured"}
    assert "the page could not be written (KeyError: 'unforeseen')" in capsys.readouterr().err


def boxes_at(minutes: float) -> dict[str, float]:
    """Of a check in which every stage takes all of its box."""
    alone = tuple(one for one in check.STAGES if one.ranks == 1)
    left_s, boxes = 0.95 * 60 * minutes, {}
    for number, one in enumerate(alone):
        seconds = box_s(alone, number, left_s)
        boxes[one.name] = seconds if seconds >= one.least_s else 0.0
        left_s -= boxes[one.name]
    return boxes


def test_nine_minutes_are_enough_for_what_is_worth_most_and_are_not_spread_thin():
    boxes = boxes_at(9)
    assert [name for name, seconds in boxes.items() if seconds] == ["machine", "ceilings", "nvml", "memory", "train"]
    # Every load begins with a process, and the device's context.
    assert boxes["nvml"] > FULL.settle_s + FULL.idle_s + 2 * (FULL.load_s + 5)
    assert boxes["ceilings"] > FULL.ceiling_s + 5
    assert sum(boxes.values()) == pytest.approx(0.95 * 540)


def test_forty_minutes_are_enough_for_every_stage():
    boxes = boxes_at(40)
    assert all(boxes.values())
    assert boxes["tune"] > 9 * 60


def test_a_check_of_another_device_or_a_broken_file_is_replaced(tmp_path):
    table, out = named("a", "b"), tmp_path / "out"
    check.run_check(make_rig(tmp_path / "cpu", no_trial), table, 60, out)
    on_gpu = check.run_check(make_rig(tmp_path / "gpu", no_trial, gpu=facts()), table, 60, out, only=["b"])
    assert statuses(on_gpu) == {"a": "not asked for", "b": "measured"}
    (out / check.REPORT_NAME).write_text('{"stages": [')
    after = check.run_check(make_rig(tmp_path / "more", no_trial), table, 60, out, only=["b"])
    assert statuses(after) == {"a": "not asked for", "b": "measured"}


def test_a_stage_of_several_ranks_is_left_out_unless_they_are_asked_for(tmp_path):
    rig = make_rig(tmp_path, no_trial)
    table = (*named("a"), Stage(name="ranks", measure=one_figure, weight=1, least_s=1.0, ranks=2))
    report = check.run_check(rig, table, 60, tmp_path / "out")
    assert (report.stages[1].status, report.exit_code) == ("not asked for", 0)
    assert "--nproc 2" in report.stages[1].reason
    rig.nproc = 2
    assert statuses(check.run_check(rig, table, 60, tmp_path / "out"))["ranks"] == "measured"


def test_a_bar_that_is_short_is_code_1(tmp_path):
    def slow(rig, sheet, box):
        sheet.measured("bert_120m_mfu_share", 0.3)

    rig = make_rig(tmp_path, no_trial, gpu=facts(), sizes=FULL)
    report = check.run_check(rig, (stage("train", slow),), 60, tmp_path / "out")
    bars = {bar["name"]: bar for bar in written(tmp_path)["bars"]}
    assert bars["gpu_train_bert_120m_mfu_share"]["holds"] is False
    assert bars["gpu_train_bert_350m_mfu_share"]["holds"] is None
    assert report.exit_code == 1


def test_what_a_check_wrote_is_read_back_whole(tmp_path):
    table = (stage("first", broken), stage("second", one_figure))
    report = check.run_check(make_rig(tmp_path, no_trial, gpu=facts(), sizes=FULL), table, 60, tmp_path / "out")
    assert CheckReport.of(written(tmp_path)) == report


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "train,nosuch"], "no such stage for --nproc 1: nosuch"),
        (["--only", "ranks"], "no such stage for --nproc 1: ranks"),
        (["--nproc", "0"], "--nproc 0"),
        (["--minutes", "0"], "--minutes 0"),
    ],
)
def test_options_that_cannot_be_are_refused(words, says, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        check.main(["--out", str(tmp_path), *words])
    assert says in capsys.readouterr().err
