"""The order of the GPU check's stages, and reasons for leaving some out."""

import json
import subprocess
import sys

import pytest

from autotune.errors import UsageError
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.claims import CLAIMS
from benchmarks.gpu.queue import GpuMachine, Queue, list_text, plan, plan_text, select
from benchmarks.gpu.results import ENDED, ROOT, Known, code_digest, known_results
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.stages import FULL, TINY, stages_of
from benchmarks.gpu.step_settings import STEP_SETTINGS, StepSetting, reason_unavailable

STAGES = stages_of(FULL)
H100 = GpuMachine(name="h100", gpus=1, memory_bytes=80 * 10**9)
H200 = GpuMachine(name="h200", gpus=1, memory_bytes=141 * 10**9)
CODE = ("benchmarks/gpu/arithmetic.py",)


def stage(name, **changes):
    times = {"least_s": 10.0, "most_s": 60.0}
    return Stage(name=name, words=(name,), code=CODE, **times | changes)


def result(stage, status=ENDED, began_utc="2026-01-02T00:00:00+00:00", **made_with):
    return {
        "status": status,
        "words": list(stage.words),
        "began_utc": began_utc,
        "made_with": {"code": code_digest(CODE), "torch": "2.11", **made_with},
    }


def queue(stages, results=None, only=""):
    known = {
        name: Known(result=found, directory=ROOT)
        for name, found in (results or {}).items()
    }
    return Queue(
        stages=stages,
        chosen=select(stages, only),
        known=known,
        libraries={"torch": "2.11"},
    )


def planned(stages, results=None, machine=H100, seconds=600.0, there=(), only=""):
    chosen, left_out = plan(
        queue(stages, results, only), machine, seconds, there.__contains__
    )
    reasons = {one.stage.name: one.reason for one in left_out}
    return [one.name for one in chosen], reasons


A, B, C = (stage(name) for name in "abc")


def test_runs_the_most_valuable_stages_first():
    assert planned([A, B, C], seconds=130.0) == (
        ["a", "b", "c"],
        {},
    )
    names, reasons = planned([A, B, C], seconds=125.0)
    assert names == ["a", "b"]
    assert reasons == {"c": "no time: takes at least 10 s"}


def test_known_results_are_not_repeated():
    assert planned([A, B], {"a": result(A)}) == (["b"], {})


@pytest.mark.parametrize(
    "change",
    [
        {"words": ["a", "--other"]},
        {"made_with": {"code": "of before", "torch": "2.11"}},
        {"made_with": {"code": code_digest(CODE), "torch": "2.10"}},
    ],
    ids=["command", "code", "library"],
)
def test_outdated_results_come_after_missing_ones(change):
    assert planned([A, B], {"a": result(A) | change}) == (["b", "a"], {})


def test_cut_off_stage_continues_first():
    assert planned([A, B], {"a": result(A, "cut off")})[0] == ["a", "b"]


def test_failed_stage_is_tried_last():
    results = {"a": result(A, "failed"), "b": result(B, torch="2.10")}
    assert planned([A, B, C], results)[0] == ["c", "b", "a"]


def test_training_is_repeated_with_its_profile():
    writer = stage("tune", writes="profiles/a-{gpu}.toml")
    reader = stage("train", reads="profiles/a-{gpu}.toml", is_training=True)
    results = {
        "tune": result(writer, began_utc="2026-01-03T00:00:00+00:00"),
        "train": result(reader),
    }
    assert planned([writer, reader], results, there=["profiles/a-h100.toml"])[0] == [
        "train"
    ]
    assert planned([writer, reader], {"train": result(reader)})[0] == ["tune", "train"]


def test_missing_input_names_the_stage_that_writes_it():
    writer = stage("tune", writes="profiles/a-{gpu}.toml")
    reader = stage("train", reads="profiles/a-{gpu}.toml")
    _, reasons = planned([writer, reader], only="train")
    assert reasons == {"train": "needs profiles/a-h100.toml from tune"}
    names, _ = planned([writer, reader], only="train", there=["profiles/a-h100.toml"])
    assert names == ["train"]


def test_reference_runs_in_the_same_call():
    ours, theirs = stage("ours"), stage("theirs", reference="ours")
    done = {"ours": result(ours)}
    assert planned([ours, theirs], done) == (["ours", "theirs"], {})
    _, reasons = planned([ours, theirs], done, seconds=15.0)
    assert reasons == {"theirs": "no time: takes at least 20 s"}
    other = stage("other", reference="ours")
    assert planned([ours, theirs, other], done)[0] == ["ours", "theirs", "other"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpus": 2}, "needs 2 GPUs"),
        (
            {"least_memory_bytes": 120 * 10**9},
            "needs a GPU with at least 112 GiB (H200): this one has 74.5 GiB",
        ),
        ({"modules": ("no_such_module",)}, "no_such_module is not installed"),
        ({"modules": ("no_such.module",)}, "no_such.module is not installed"),
        ({"unavailable": "train.x: not known"}, "train.x: not known"),
    ],
)
def test_stage_that_cannot_run_says_why(changes, reason):
    impossible = stage("a", **changes)
    assert planned([impossible, B]) == (["b"], {"a": reason})
    if "least_memory_bytes" in changes:
        assert planned([impossible], machine=H200)[0] == ["a"]


def test_plan_shows_what_is_left_out():
    chosen, left_out = plan(queue([A, B]), H100, 65.0, lambda path: True)
    text = plan_text(chosen, left_out)
    assert text.splitlines()[2].split() == ["a", "10", "to", "60", "s"]
    assert "no time" in text.splitlines()[-1]


def test_list_shows_the_status_on_each_gpu():
    results = {"a": result(A), "c": result(C, "failed")}
    large = stage("large", least_memory_bytes=120 * 10**9)
    stages = [A, B, C, large]
    text = list_text(
        {"h100": queue(stages, results), "h200": queue(stages)},
        {"h100": H100.memory_bytes},
    )
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[1] == "a any 10 to 60 - done on 2026-01-02 waiting"
    assert rows[3] == "c any 10 to 60 - failed on 2026-01-02 waiting"
    assert rows[4].endswith("- needs more memory waiting")


def test_list_needs_no_gpu(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path), "--list"]) == 0
    shown = capsys.readouterr().out
    for one in STAGES:
        assert f"\n{one.name} " in shown
    assert "h200" in shown.splitlines()[0]


def test_newest_result_is_known(tmp_path):
    kept, out = tmp_path / "kept", tmp_path / "out"
    for directory, stages in (
        (kept / "h100/2026-01-01", {"a": result(A, began_utc="2026-01-01")}),
        (kept / "h100/2026-01-02", {"a": result(A, began_utc="2026-01-02")}),
        (kept / "h200/2026-01-03", {"b": result(B)}),
        (out / "h100", {"a": result(A, "failed", "2026-01-04"), "c": result(C)}),
    ):
        directory.mkdir(parents=True)
        (directory / "check.json").write_text(json.dumps({"stages": stages}))
    known = known_results(out, "h100", kept)
    assert {name: found.date for name, found in known.items()} == {
        "a": "2026-01-02",
        "c": "2026-01-02",
    }


def test_docstrings_do_not_change_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.results.ROOT", tmp_path)
    texts = ('"""One."""\nx = 1  # why\n', '"""Two."""\n\nx = 1\n', "x = 2\n")
    digests = []
    for number, text in enumerate(texts):
        directory = tmp_path / str(number) / "code"
        directory.mkdir(parents=True)
        (directory / "a.py").write_text(text)
        monkeypatch.setattr("benchmarks.gpu.results.ROOT", tmp_path / str(number))
        code_digest.cache_clear()
        code_digest.__wrapped__.__globals__["_digest_of"].cache_clear()
        digests.append(code_digest(("code",)))
    assert digests[0] == digests[1] != digests[2]
    monkeypatch.undo()
    code_digest.cache_clear()
    code_digest.__wrapped__.__globals__["_digest_of"].cache_clear()


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("probe-modernbert-large,newcomer", ["probe-modernbert-large", "newcomer"]),
        ("doc,train-bert-350m", ["train-bert-350m", "doctor"]),
        ("", [stage.name for stage in STAGES if not stage.every_call]),
        ("doctor,maths", None),
    ],
)
def test_stages_can_be_selected(only, names):
    if names is None:
        with pytest.raises(UsageError, match="stage 'maths' not found"):
            select(STAGES, only)
    else:
        chosen = [one.name for one in select(STAGES, only)]
        assert chosen == ["arithmetic", *names]


@pytest.mark.parametrize("sizes", [FULL, TINY], ids=["full", "tiny"])
def test_every_input_has_a_stage_that_writes_it(sizes):
    stages = stages_of(sizes)
    names = [one.name for one in stages]
    assert len(names) == len(set(names))
    written = {one.writes for one in stages}
    for one in stages:
        assert one.reads is None or one.reads in written
        assert one.reference is None or one.reference in names
        assert one.least_s <= one.most_s


def test_long_stages_can_continue():
    for one in STAGES:
        if one.most_s > 120 and "train" in one.words:
            assert one.from_scratch is None
            assert "train.checkpoint.enabled=false" not in one.words


def test_unmeasured_claim_names_its_stages():
    names = [one.name for one in STAGES]
    for claim in CLAIMS:
        assert claim.bar({}).holds is None
        for word in claim.measured_by.split(","):
            assert any(name.startswith(word) for name in names), word


def test_unknown_setting_is_unavailable():
    assert reason_unavailable(STEP_SETTINGS[0]) is None
    for changed, key in (
        ({"no_such_setting": True}, "train.no_such_setting: "),
        ({"attention": "fa99"}, "train.attention: "),
    ):
        row = StepSetting(name="new", changed=changed)
        assert reason_unavailable(row).startswith(key)


def test_check_imports_no_torch():
    code = (
        "import sys, benchmarks.gpu.__main__; sys.exit(bool({'torch', 'transformers',"
        " 'optuna'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert ended.returncode == 0
