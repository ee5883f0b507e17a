import json

import pytest

from autotune.cli import run
from autotune.errors import BadInput, ExceedsMemory
from autotune.tune import between_nodes, pipeline
from autotune.tune.values import Stage, TuningResult

TUNE = [
    "tune",
    "--model",
    "bert-mini",
    "--model",
    "bert-small",
    "--data",
    "data",
    "--memory",
    "1GiB",
]


class RecordedTuning:
    """A tuning that only records its request, and returns a prepared result."""

    def __init__(self, place):
        (place / "p").mkdir()
        (place / "p.toml").rename(place / "p" / "tiny-cpu.toml")
        stages = (
            Stage(
                name="probe",
                model="bert-mini",
                status="done",
                summary="66 rows fit",
                seconds=3.0,
            ),
            Stage(name="baseline", model="bert-mini", status="done"),
            Stage(
                name="probe",
                model="bert-small",
                status="failed",
                summary="not even one row fits",
            ),
        )
        self.result = TuningResult(
            profiles=("p/tiny-cpu.toml",),
            report="r/report.html",
            stages=stages,
            seconds=9.5,
            seconds_in_children=9.0,
            next_steps=("autotune advise p/tiny-cpu.toml",),
        )
        self.failed = []
        self.error = None
        self.has_saved = True
        self.request = None

    def __call__(self, *, request):
        self.request = request
        return self

    def run(self):
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def tuning(workdir, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    recorded = RecordedTuning(workdir)
    monkeypatch.setattr(pipeline, "Tuning", recorded)
    return recorded


@pytest.fixture
def call(tuning, says):
    return lambda *words, code=0: says(*TUNE, *words, code=code)


def test_options_reach_the_request(tuning, call):
    words = [
        "--seq-length",
        "128",
        "--precision",
        "bf16",
        "--attention-dropout",
        "0",
        "--global-batch-tokens",
        "4096",
        "--ranks",
        "2",
        "--max-micro-batch-size",
        "64",
        "--window",
        "0.5s",
        "--trial-timeout",
        "60s",
        "--out",
        "here",
        "--reports",
        "there",
        "--device",
        "cpu",
        "--nodes",
        "4",
        "--time-limit",
        "7min",
    ]
    call(*words)
    request = tuning.request
    probe = tuning.request.subjects.probes[1]
    assert request.subjects.names == ["bert-mini", "bert-small"]
    window_s = request.subjects.window_s
    assert (request.device, request.minutes, request.nodes, window_s) == (
        "cpu",
        7.0,
        4,
        0.5,
    )
    assert (str(probe.data), str(request.out), str(probe.reports)) == (
        "data",
        "here",
        "there",
    )
    step = probe.config
    assert (step.seq_length_tokens, step.precision, step.attention_dropout) == (
        128,
        "bf16",
        0.0,
    )
    assert step.global_batch_tokens == 4096
    assert "layout" not in step.model_fields_set  # what suits the model
    assert (
        probe.memory_bytes,
        probe.ranks,
        probe.max_size,
        probe.trial_timeout_s,
    ) == (2**30, 2, 64, 60.0)
    assert (probe.traced, probe.accumulate) == (True, True)


def test_skips_only_exploration_by_default(tuning, call):
    call()
    assert tuning.request.skip == {"explore"}
    call("--explore")
    assert tuning.request.skip == frozenset()
    left_out = [
        "estimate",
        "probe",
        "accumulation",
        "workers",
        "network",
        "baseline",
        "report",
    ]
    call(*(word for name in left_out for word in ("--skip", name)))
    assert tuning.request.skip == {
        "estimate",
        "probe",
        "explore",
        "workers",
        "network",
        "baseline",
        "report",
    }
    probe = tuning.request.subjects.probes[0]
    assert (probe.traced, probe.accumulate) == (False, False)


def test_time_limit_is_per_model(tuning, says, call):
    def minutes(*words):
        call(*words)
        return tuning.request.minutes

    assert minutes("--explore") > minutes()
    assert minutes("--explore", "--time-limit", "3min") == 3
    plain = minutes()
    says("tune", "--model", "bert-mini", "--data", "data")
    assert tuning.request.minutes == plain / 2


def test_prints_a_table(call):
    out = call()
    assert out.startswith("subject")
    assert "not done: probe of bert-small: not even one row fits" in out
    assert out.rstrip().endswith("next: autotune advise p/tiny-cpu.toml")


def test_json_lists_every_phase(call):
    printed = json.loads(call("--json"))
    assert (printed["profiles"], printed["report"]) == (
        ["p/tiny-cpu.toml"],
        "r/report.html",
    )
    assert [
        (phase["name"], phase["model"], phase["status"]) for phase in printed["stages"]
    ] == [
        ("probe", "bert-mini", "done"),
        ("baseline", "bert-mini", "done"),
        ("probe", "bert-small", "failed"),
    ]
    assert (printed["seconds"], printed["seconds_in_children"]) == (9.5, 9.0)


def test_failed_model_gives_its_exit_code(tuning, capsys):
    tuning.failed = [
        ExceedsMemory("not even one row fits", next_step="Raise --memory.")
    ]
    assert run(TUNE) == 4
    captured = capsys.readouterr()
    assert "profile: p/tiny-cpu.toml" in captured.out
    assert "error: not even one row fits\n  next: Raise --memory." in captured.err


def test_ended_tuning_says_how_to_resume(tuning, call, monkeypatch):
    tuning.error = BadInput(
        "cannot write reports: No space left on device", next_step="Free space."
    )
    err = call("--out", "my profiles", code=3)
    assert (
        "finished phases are saved; to resume: autotune tune --model bert-mini" in err
    )
    assert "--out 'my profiles'\n" in err
    assert "Free space." in err
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "--memory 1GiB --slurm\n" in call(code=3)  # it is to be submitted again
    tuning.has_saved = False
    assert "to go on from here" not in call(code=3)
    tuning.error = KeyboardInterrupt()
    assert "run the same command again" in call(code=130)


def test_rejects_unknown_model_or_phase(tuning, call, says):
    assert "wokers" in call("--skip", "wokers", code=2)
    assert "bert-mini" in says("tune", "--model", "bert-mni", "--data", "data", code=3)
    assert "Write --memory 94GB" in says(
        "tune", "--model", "bert-mini", "--data", "data", "--memory", "94", code=2
    )
    assert tuning.request is None


def test_all_models_are_one_job(tuning, call):
    first, second = call(
        "--nodes", "4", "--time-limit", "22min", "--slurm", "--dry-run"
    ).split("\n\n#!/bin/bash")
    assert "#SBATCH --nodes=1" in first
    assert "#SBATCH --nodes=2" in second
    for words in (["--explore"], ["--nodes", "4", "--skip", "network"]):
        script = call(*words, "--slurm", "--dry-run")
        assert script.count("#!/bin/bash") == 1
        assert "tune --model bert-mini --model bert-small" in script
        assert words[0] in script
        assert "#SBATCH --nodes=1" in script
    # The network's part of a model's 11 minutes, beside workers (3), confirm (2) and
    # what settings are worth (1): 3 of 9.
    words = (
        "tune-between-nodes reports/jobs/tune-JOB.json --data data --time-limit 3.7min"
        " --trial-timeout 600s"
    )
    assert words in second
    assert tuning.request is None


def test_job_leaves_its_result_to_the_next(tuning, monkeypatch, tmp_path, call, says):
    call("--nodes", "2")
    # Outside of a job there is no second one.
    assert not (tmp_path / "reports").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    call("--nodes", "2")
    written = json.loads((tmp_path / "reports" / "jobs" / "tune-7.json").read_text())
    assert written == {
        "profiles": ["p/tiny-cpu.toml"],
        "report": "r/report.html",
        "repeated": ["baseline"],
    }
    requests = []

    def measure(found_by, request):
        requests.append((str(found_by), request.budget_s, request.trial_timeout_s))
        return tuning.result

    monkeypatch.setattr(between_nodes, "measure_between_nodes", measure)
    command = [
        "tune-between-nodes",
        "reports/jobs/tune-7.json",
        "--data",
        "data",
        "--time-limit",
        "4.7min",
    ]
    assert "profile: p/tiny-cpu.toml" in says(
        *command, "--trial-timeout", "60s", "--reports", "reports"
    )
    assert requests == [("reports/jobs/tune-7.json", 282.0, 60.0)]


OWN = ("tune", "--step", "mine:build_step", "--loader", "mine:build_loader")


def test_options_of_own_code_reach_the_request(tuning, says):
    says(
        *OWN,
        "--memory",
        "64MiB",
        "--vary",
        "fused=false,true",
        "--set",
        "width=1,2",
        "--ranks",
        "2",
        "--explore",
        "--window",
        "0.2s",
        "--skip",
        "estimate",
    )
    request = tuning.request
    assert request.subjects.names == ["mine-width-1", "mine-width-2"]
    # 30 minutes for each.
    assert (request.minutes, request.subjects.window_s) == (60.0, 0.2)
    assert request.skip == {"estimate"}
    probe = request.subjects.probes[1]
    assert (probe.memory_bytes, probe.ranks, probe.traced) == (2**26, 2, False)
    assert probe.subject.table() == {
        "step_function": "mine:build_step",
        "loader_function": "mine:build_loader",
        "arguments": {"width": 2},
        "varied": {"fused": [False, True]},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*OWN, "--model", "bert-mini"), "--model cannot be used with your own code"),
        ((*OWN, "--data", "data"), "--data cannot be used with your own code"),
        ((*OWN, "--nodes", "2"), "--nodes cannot be used with your own code"),
        ((*OWN, "--skip", "accumulation"), "--skip accumulation cannot be used"),
        ((*OWN, "--set", "a=1", "--vary", "a=1,2"), "--vary a cannot be used with"),
        (("tune", "--model", "bert-mini"), "autotune tune requires --data"),
        (("tune",), "autotune tune requires --model"),
        (
            (*TUNE, "--loader", "mine:build_loader"),
            "--loader applies to your own code",
        ),
        ((*TUNE, "--vary", "a=1,2"), "--vary applies to your own code"),
    ],
)
def test_options_that_exclude_each_other(tuning, says, words, message):
    assert message in says(*words, code=2)
    assert tuning.request is None
