import functools
import json
import shlex
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.search.profiles import read_profile
from benchmarks.gpu.check.children import Ended
from benchmarks.gpu.check.results import Sheet, StageResult
from benchmarks.gpu.check.rig import NoTimeLeft, TimeBox
from benchmarks.gpu.check.sizes import FULL, TINY_ON_CPU
from benchmarks.gpu.stage import tuning
from tests.benchmarks.gpu.rigs import facts, make_rig
from tests.documentation.blocks import ROOT, Command
from tests.documentation.command_line import check

SHIPPED = Path(__file__).parents[3] / "profiles" / "bert-mini-cpu.toml"


def no_trial(trial):
    raise AssertionError("no trial was expected")


def words(tmp_path, gpu=None, sizes=FULL) -> list[str]:
    return tuning.tune_arguments(make_rig(tmp_path, no_trial, gpu=gpu, sizes=sizes), 12.5)


def test_a_larger_card_is_tuned_for_an_h100_nvl_and_others_for_themselves(tmp_path):
    large = words(tmp_path / "h200", facts())
    assert large[large.index("--gpu") + 1] == "h100-nvl-94gb"
    assert [large[number + 1] for number, word in enumerate(large) if word == "--model"] == ["bert-120m", "bert-350m"]
    assert "--gpu" not in words(tmp_path / "nvl", facts(95_830 * 2**20))
    assert "--memory" not in large


@pytest.mark.parametrize("sizes", [FULL, TINY_ON_CPU], ids=["full", "tiny"])
def test_the_command_is_one_that_autotune_knows(tmp_path, sizes):
    line = shlex.join(["autotune", *words(tmp_path, sizes=sizes)])
    check(Command(page=ROOT, line=0, text=line))


def answer(status: str = "done") -> str:
    return json.dumps({"seconds": 98.5, "stages": [{"name": "baseline", "model": "bert-mini", "status": status}]})


def deciding(undecided, path):
    """A profile whose loader workers are decided, or not."""
    found = read_profile(path)
    workers = found.profile.evidence.workers.model_copy(update={"undecided_between": list(undecided)})
    evidence = found.profile.evidence.model_copy(update={"workers": workers})
    return replace(found, profile=found.profile.model_copy(update={"evidence": evidence}))


def tuned(
    tmp_path, monkeypatch, ended: Ended, answer: str = "", *, undecided=(), earlier=None, read=None, most_minutes=0.3
):
    """As if the command had written one profile and come to that end."""
    rig = make_rig(
        tmp_path, no_trial, sizes=replace(TINY_ON_CPU, tuned_models=("bert-mini",), tune_most_minutes=most_minutes)
    )
    rig.out.mkdir(exist_ok=True)
    rig.unfinished = {"tune": replace(earlier, made_with=rig.made_with)} if earlier else {}
    monkeypatch.setattr(tuning, "read_profile", read or functools.partial(deciding, undecided))

    def run(arguments, limit_s, on_line, *, cwd, stdout):
        assert bool(earlier) == (cwd / "reports").exists()
        (cwd / "profiles").mkdir(exist_ok=True)
        (cwd / "profiles" / SHIPPED.name).write_bytes(SHIPPED.read_bytes())
        ledger = cwd / "reports" / "bert-mini-cpu" / "ledger"
        ledger.mkdir(parents=True, exist_ok=True)
        (ledger / "some-host-17-ab.jsonl").write_text("{}\n")
        stdout.write_text(answer)
        return ended

    monkeypatch.setattr(rig.programs, "run", run)
    sheet, error = Sheet(), None
    try:
        tuning.measure(rig, sheet, TimeBox(clock=rig.clock, end_s=rig.clock.monotonic_s() + 60))
    except NoTimeLeft as no_time:
        error = no_time
    with zipfile.ZipFile(rig.out / tuning.ARCHIVE_NAME) as packed:
        names = packed.namelist()
    return {figure.name: figure for figure in sheet.figures}, names, error


def test_what_it_wrote_is_read_and_kept_without_the_name_of_the_host(tmp_path, monkeypatch):
    done = Ended(exit_code=0, cut_off=False, tail="")
    figures, names, error = tuned(tmp_path, monkeypatch, done, answer())
    assert error is None
    assert 0 < figures["all_models_s"].value == figures["commands_s"].value
    assert figures["chosen_data_wait_share"].label == "measured"
    assert figures["profiles_count"].value == 1
    assert "profiles/bert-mini-cpu.toml" in names
    assert not [name for name in names if "some-host" in name]
    assert [name for name in names if name.endswith(".jsonl")]


def test_one_that_is_cut_off_keeps_what_it_had(tmp_path, monkeypatch):
    figures, names, error = tuned(tmp_path, monkeypatch, Ended(exit_code=-9, cut_off=True, tail=""))
    assert isinstance(error, NoTimeLeft)
    assert figures["all_models_s"].label == "not measured"
    assert figures["bert_mini_cpu_micro_batch_rows_count"].value > 0
    assert "profiles/bert-mini-cpu.toml" in names


@pytest.mark.parametrize(
    ("status", "undecided", "says"),
    [("failed", (), "failed: baseline of bert-mini"), ("done", (0, 2), "before the loader workers of bert-mini-cpu")],
)
@pytest.mark.parametrize("most_minutes", [0.3, 15.0])
def test_a_tuning_that_left_something_open_took_no_time_that_counts(
    most_minutes, status, undecided, says, tmp_path, monkeypatch
):
    done = Ended(exit_code=0, cut_off=False, tail="")
    figures, _, error = tuned(
        tmp_path, monkeypatch, done, answer(status), undecided=undecided, most_minutes=most_minutes
    )
    assert (error is None) == (most_minutes == 0.3)  # with more time it may be decided
    for name in ("all_models_s", "chosen_data_wait_share"):
        assert figures[name].label == "not measured"
        assert says in figures[name].reason
    assert figures["commands_s"].label == "measured"


def test_one_that_was_cut_off_goes_on_from_what_it_wrote_and_all_of_its_time_counts(tmp_path, monkeypatch):
    tuned(tmp_path / "first", monkeypatch, Ended(exit_code=-9, cut_off=True, tail=""))
    second = tmp_path / "second" / "out"
    second.mkdir(parents=True)
    (tmp_path / "first" / "out" / tuning.ARCHIVE_NAME).rename(second / tuning.ARCHIVE_NAME)
    earlier = StageResult(
        name="tune", status="not measured", measured_utc="2026-01-02T03:04:05+00:00", details={"spent_s": 500.0}
    )
    done = Ended(exit_code=0, cut_off=False, tail="")
    figures, names, _ = tuned(tmp_path / "second", monkeypatch, done, answer(), earlier=earlier)
    assert figures["all_models_s"].value > 500
    assert len([name for name in names if name.endswith(".jsonl")]) == 2


def test_a_profile_that_cannot_be_read_costs_nothing_else(tmp_path, monkeypatch):
    def refuse(path):
        raise BadInput("broken", next_step="")

    done = Ended(exit_code=0, cut_off=False, tail="")
    figures, _, _ = tuned(tmp_path, monkeypatch, done, answer(), read=refuse)
    assert figures["profiles_count"].value == 0
    assert figures["all_models_s"].label == "not measured"
    assert figures["chosen_data_wait_share"].label == "not measured"
