import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.errors import (
    BadInput,
    ExceedsMemory,
    NotCheckable,
    OutOfTime,
    Undecided,
    UsageError,
)
from autotune.evidence.confirm import ConfirmEvidence, DeliveredTraining, SplitRates
from autotune.memory.estimate import CannotTrace
from autotune.profiles.store import WrittenProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.memory.probe import MlmProbeRequest
from autotune.subjects.mlm.memory.probe_requests import requested_config
from autotune.trials.decide.least_time import ASSUMED_TRIAL_S, USUAL_S, least_s
from autotune.trials.sweep_request import SweepRequest
from autotune.tune import between_nodes, pipeline
from autotune.tune import subjects as tuned_subjects
from autotune.tune.between_nodes import REPEATED_MINUTES, measure_between_nodes
from autotune.tune.next_steps import next_steps
from autotune.tune.pipeline import TuneRequest, Tuning
from autotune.tune.subjects import SubjectsToTune
from testbed.examples.profiles import but, example_profile
from testbed.fakes import FakeClock
from tests.autotune.tune.test_sections import worth
from trainer.formats.errors import TrainerError
from trainer.formats.train_config import ModelSettings

TOOK_S = {
    "estimate": 4.0,
    "probe": 60.0,
    "explore": 50.0,
    "workers": 30.0,
    "network": 20.0,
    "confirm": 8.0,
    "baseline": 10.0,
}
CONFIRMED = ConfirmEvidence(
    rows=[
        SplitRates(
            micro_batch_size=2,
            gradient_accumulation_steps=128,
            micro_batches_measured=4,
            tokens_per_s=[990.0, 1000.0, 1010.0],
        )
    ],
    num_workers=1,
    local_ranks=1,
    promised_tokens_per_s=1000.0,
    promised_low=980.0,
    promised_high=1020.0,
    delivered=DeliveredTraining(tokens_per_s=995.0, steps=10, seconds=20.0),
    window_s=2.0,
    windows=3,
    seconds=7.0,
)
SERVER_S = 120.0
RANKS_S = 15.0
UNPROBED = frozenset({"estimate", "probe", "explore"})


def left_at(path, model):
    profile = but(example_profile(), train={"model": model})
    path.parent.mkdir(exist_ok=True)
    path.write_text(profile_to_toml(profile))
    return profile


class Stages:
    """The functions of a tuning's phases, which only record calls and take time."""

    def __init__(self, directory):
        self.clock = FakeClock()
        self.calls = []
        self.minutes = {}
        self.window_s = {}
        self.errors = {}
        self.local_ranks = 1
        self.traced = []
        self.trace = None
        self.benches = 0
        models = [
            ModelSettings(name=name, config={"model_type": "bert"})
            for name in ("a", "b")
        ]
        configs = [requested_config(model, seq_length_tokens=128) for model in models]
        probes = tuple(
            MlmProbeRequest(
                config=config, data=directory / "data", reports=directory / "r"
            )
            for config in configs
        )
        self.request = TuneRequest(
            subjects=SubjectsToTune(probes=probes),
            out=directory / "p",
            device="cpu",
            minutes=20.0,
            skip=frozenset({"explore"}),
        )

    def run(self, **changes):
        self.tuning = Tuning(request=replace(self.request, **changes), clock=self.clock)
        return self.tuning, self.tuning.run()

    def does(self, stage, model, request=None):
        self.calls.append((stage, model))
        if request is not None:
            self.minutes[stage, model] = request.budget_s / 60
            self.window_s[stage, model] = request.window_s
            self.ends_s = request.budget_ends_s
        self.clock.sleep(TOOK_S.get(stage, 0.0))
        if error := self.errors.get((stage, model)):
            raise error

    def prepare(self, request, bench):
        def estimate(machine):
            self.does("estimate", request.name)
            return SimpleNamespace(of=request.name, max_micro_batch_size=20)

        size_probe = SimpleNamespace(
            trace=self.trace,
            estimate=estimate,
            words=lambda size: f"{size} sequences",
            memory_budget_bytes=2**30,
        )
        return SimpleNamespace(
            subject=self.requested_subject(request),
            local_ranks=self.local_ranks,
            request=request,
            size_probe=lambda: size_probe,
        )

    def requested_subject(self, request):
        """A subject with a loader, and with a setting to search."""
        return SimpleNamespace(
            kind="mlm",
            words=request.name,
            table=dict,
            loader=lambda choice: "a loader",
            settings=lambda: [SimpleNamespace(name="precision")],
        )

    def profile_subject(self, profile, data):
        return None

    def probe_one(self, bench, ready, path, traced, *, ends_s):
        self.traced.append(traced)
        self.does("probe", ready.request.name)
        return WrittenProfile(
            path=path,
            profile=left_at(path, ready.request.config.model),
            trials=(),
            previous=None,
        )

    def explore(self, step):
        self.does("explore", step.stored.profile.train.model.name, step.sweep)
        return SimpleNamespace(choice="nothing is faster")

    def sweep_loader(self, bench, stored, request, path):
        self.does("workers", stored.profile.train.model.name, request)
        return WrittenProfile(path=path, profile=stored.profile)

    def measure_network(self, stored, request, nodes, bench=None, display=None):
        self.nodes = nodes
        name = stored.profile.train.model.name
        self.does("network", name, request)
        # With the chosen gradient synchronisation.
        chosen = but(stored.profile, train={"micro_batch_size": 1})
        stored.path.write_text(profile_to_toml(chosen))
        return SimpleNamespace(choice="ddp, bf16"), RANKS_S

    def confirm_profile(self, training, *, budget_s, training_s):
        stored, request = training
        assert budget_s == request.budget_s
        self.does("confirm", stored.profile.train.model.name, request)
        self.training_s = training_s
        return CONFIRMED

    def compare_recipes(self, bench, stored, request, left_out=()):
        name = stored.profile.train.model.name
        assert stored.profile.train.micro_batch_size == (
            1 if ("network", name) in self.calls else 2
        )
        self.does("baseline", name, request)
        return worth(example_profile()).evidence.baseline

    def build_report(self, profiles, reports, out, *, data):
        self.does("report", "")
        self.reported = [path.stem for path in profiles]

    @contextlib.contextmanager
    def open_subject(
        self, device, subject, data, *, import_timeout_s=0.0, check=lambda site: None
    ):
        self.benches += 1
        yield SubjectBench(
            site=SimpleNamespace(name="cpu", device="cpu"),
            subject=subject,
            server=SimpleNamespace(waited_s=SERVER_S),
            machine=SimpleNamespace(),
        )


@pytest.fixture
def stages(monkeypatch, tmp_path):
    recorded = Stages(tmp_path)
    in_both = ("measure_network", "confirm_profile", "compare_recipes", "open_subject")
    phases = {
        tuned_subjects: (*in_both, "probe_one", "explore", "sweep_loader"),
        between_nodes: (*in_both, "build_report", "profile_subject"),
    }
    for module, names in phases.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(recorded, name))
        monkeypatch.setattr(
            module, "training_of", lambda bench, stored, request: (stored, request)
        )
    for name in ("prepare", "requested_subject"):
        function = getattr(recorded, name)
        monkeypatch.setattr(
            MlmProbeRequest,
            name,
            lambda request, *given, function=function: function(request, *given),
        )
    monkeypatch.setattr(pipeline, "build_report", recorded.build_report)
    for module in (pipeline, between_nodes):
        monkeypatch.setattr(module, "nodes_here", lambda: 1)
    return recorded


def stage_of(result, name, model="a"):
    return next(
        stage for stage in result.stages if (stage.name, stage.model) == (name, model)
    )


def summary_of(result, name, model="a"):
    return stage_of(result, name, model).summary


def test_probes_all_models_before_the_rest(stages):
    stages.local_ranks = 2
    stages.trace = "a trace"
    _, result = stages.run(skip=frozenset())
    rest = ["explore", "workers", "network", "confirm", "baseline"]
    assert stages.calls == [
        ("estimate", "a"),
        ("estimate", "b"),
        ("probe", "a"),
        ("probe", "b"),
        *((stage, "a") for stage in rest),
        *((stage, "b") for stage in rest),
        ("report", ""),
    ]
    assert stages.benches == 1  # one trial server for everything
    assert [stage.status for stage in result.stages] == ["done"] * 15
    assert stages.reported == ["a-cpu", "b-cpu"]
    assert [path.rpartition("/")[2] for path in result.profiles] == [
        "a-cpu.toml",
        "b-cpu.toml",
    ]
    assert result.report.endswith("r/a-cpu/report.html")
    assert summary_of(result, "baseline").startswith(
        "tuned vs the paper's trainer: 2.00"
    )
    assert {
        name: summary_of(result, name)
        for name in ("estimate", "probe", "workers", "confirm")
    } == {
        "estimate": "20 sequences predicted to fit 1 GiB",
        "probe": (
            "largest: 2 sequences; out of memory at 3; fastest 2;"
            " global batch of 256 = 128 x 2"
        ),
        "workers": "1 DataLoader workers: so",
        "confirm": "promised 1,000 tokens/s (980 to 1,020) · delivered 995",
    }
    assert stage_of(result, "probe").seconds == TOOK_S["probe"]
    assert result.seconds_in_children == SERVER_S + 2 * RANKS_S
    assert result.seconds == pytest.approx(
        2 * sum(TOOK_S[stage] for stage in ("estimate", "probe", *rest))
    )


def test_skipped_phases_say_why(stages):
    _, result = stages.run(skip=frozenset({"explore", "workers", "report"}))
    assert {("workers", "a"), ("report", "")}.isdisjoint(stages.calls)
    assert (stage_of(result, "workers").status, summary_of(result, "workers")) == (
        "skipped",
        "left out by --skip",
    )
    assert summary_of(result, "explore") == "requires --explore"
    assert (summary_of(result, "network"), result.report) == (
        "requires at least 2 ranks",
        None,
    )


def test_unprobed_model_requires_a_profile(stages):
    with pytest.raises(TrainerError, match="a-cpu"):
        stages.run(skip=UNPROBED)


def test_continues_from_profiles_without_probing(stages):
    stages.run(skip=frozenset({"explore", "workers", "report"}))
    stages.calls.clear()
    _, result = stages.run(skip=UNPROBED)
    assert stages.calls[0] == ("workers", "a")
    assert len(result.profiles) == 2


@pytest.mark.parametrize(
    ("ranks", "nodes", "job_nodes", "measured"),
    [(2, 1, 1, 1), (1, 4, 2, 2), (1, 4, 1, None)],
)
def test_measures_network_of_several_ranks(
    stages, monkeypatch, ranks, nodes, job_nodes, measured
):
    stages.local_ranks = ranks
    stages.nodes = None
    monkeypatch.setattr(pipeline, "nodes_here", lambda: job_nodes)
    stages.run(nodes=nodes)
    assert (("network", "a") in stages.calls, stages.nodes) == (
        measured is not None,
        measured,
    )


def test_prediction_reaches_the_probe(stages):
    stages.trace = "a trace"
    stages.errors["estimate", "a"] = CannotTrace("no meta kernel", next_step="none")
    _, result = stages.run()
    assert (stage_of(result, "estimate").status, summary_of(result, "estimate")) == (
        "done",
        "no meta kernel",
    )
    summary = summary_of(result, "estimate", "b")
    assert summary == "20 sequences predicted to fit 1 GiB"
    assert stages.traced == [None, SimpleNamespace(of="b", max_micro_batch_size=20)]


def test_failed_phase_leaves_the_others(stages):
    stages.errors["workers", "a"] = Undecided(
        "the window crashed", next_step="Mend that."
    )
    tuning, result = stages.run()
    assert [stage_of(result, name).status for name in ("workers", "baseline")] == [
        "failed",
        "done",
    ]
    assert (len(result.profiles), [error.message for error in tuning.failed]) == (
        2,
        ["the window crashed"],
    )


def test_phase_that_cannot_be_checked_is_skipped(stages, capsys):
    stages.errors["baseline", "a"] = NotCheckable(
        "the size before tuning is not known", next_step="Name it: --untuned size=N"
    )
    tuning, result = stages.run()
    baseline = stage_of(result, "baseline")
    assert (baseline.status, baseline.summary) == (
        "skipped",
        "the size before tuning is not known",
    )
    assert tuning.failed == []
    assert "baseline a: next: Name it: --untuned size=N" in capsys.readouterr().err


def test_phase_without_time_is_skipped(stages):
    stages.errors["workers", "a"] = OutOfTime("3 s are left", next_step="Run it again.")
    tuning, result = stages.run()  # is as one that had no time to begin
    assert (stage_of(result, "workers").status, summary_of(result, "workers")) == (
        "skipped",
        "3 s are left",
    )
    assert (stage_of(result, "baseline").status, tuning.failed) == ("done", [])


def test_model_that_does_not_fit_is_left_out(stages):
    stages.errors["probe", "a"] = ExceedsMemory(
        "not even one row fits\nat all", next_step="Raise --memory."
    )
    tuning, result = stages.run()
    assert (stage_of(result, "probe").status, summary_of(result, "probe")) == (
        "failed",
        "not even one row fits",
    )
    assert summary_of(result, "workers") == "requires a probed micro-batch"
    assert [call for call in stages.calls if call[1] == "b"] == [
        ("probe", "b"),
        ("workers", "b"),
        ("confirm", "b"),
        ("baseline", "b"),
    ]
    assert (stages.reported, len(result.profiles)) == (["b-cpu"], 1)
    assert [error.exit_code for error in tuning.failed] == [4]
    assert "b-cpu" in result.next_steps[0]
    stages.errors["probe", "b"] = stages.errors["probe", "a"]
    tuning, result = stages.run()
    assert (result.profiles, result.report, result.next_steps) == ((), None, ())
    assert stage_of(result, "report", "").status == "skipped"
    assert len(tuning.failed) == 2


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        pytest.param(
            BadInput("cannot write r", next_step="Free space."),
            "failed",
            "cannot write r",
            id="bad input",
        ),
        pytest.param(
            KeyboardInterrupt(),
            "interrupted",
            "its finished trials are kept",
            id="interrupt",
        ),
        pytest.param(ValueError(), "failed", "ValueError", id="bug"),
    ],
)
def test_common_error_ends_the_tuning(stages, capsys, error, status, words):
    stages.errors["workers", "a"] = error
    with pytest.raises(type(error)):
        stages.run()
    assert stages.calls[-1] == ("workers", "a")
    workers = stage_of(stages.tuning, "workers")
    assert (workers.status, workers.summary) == (status, words)
    assert f"workers a: {status}: {words}" in capsys.readouterr().err


def test_models_require_different_profiles(stages, tmp_path):
    with pytest.raises(UsageError, match="names one file for 2 profiles"):
        stages.run(out=tmp_path / "one.toml")
    assert stages.benches == 0


def test_phases_share_the_remaining_time(stages):
    stages.run()
    # Of all, however late.
    assert stages.ends_s == pytest.approx(
        FakeClock().utc_now().timestamp() + 1.2 * 20 * 60
    )
    shares_s = {key: 60 * minutes for key, minutes in stages.minutes.items()}
    remaining_s = 20 * 60 - 2 * TOOK_S["probe"] - USUAL_S["report"]
    # By weights: workers have 3, confirm has 2, and baseline 1. What is left out has
    # none.
    weights = {"workers": 3, "confirm": 2, "baseline": 1}
    total = 2 * sum(weights.values())
    for model in ("a", "b"):
        for name, weight in weights.items():
            share_s = remaining_s * weight / total
            assert shares_s[name, model] == pytest.approx(share_s)
            remaining_s -= TOOK_S[name]
            total -= weight


def test_windows_of_confirm_are_longer(stages):
    subjects = replace(stages.request.subjects, window_s=1.0)
    stages.run(subjects=subjects)
    assert stages.window_s["workers", "a"] == 1.0
    assert stages.window_s["confirm", "a"] == 5.0


def test_training_takes_a_tenth_of_the_time_at_most(stages):
    stages.run(minutes=8.0)
    # Shared by two models.
    assert stages.training_s == pytest.approx(8 * 60 / 10 / 2)
    stages.run(minutes=100.0)
    assert stages.training_s == 60.0


def test_phases_without_time_are_skipped(stages, capsys):
    tuning, result = stages.run(minutes=3.0)
    messages = capsys.readouterr().err
    assert "tune: takes at least" in messages
    assert (
        "warning: --time-limit 3min is shorter: phases without time are skipped"
        in messages
    )
    assert stage_of(result, "workers").status == "done"
    for name, model in (("baseline", "a"), ("workers", "b"), ("baseline", "b")):
        stage = stage_of(result, name, model)
        assert stage.status == "skipped"
        assert "of --time-limit 3min are left" in stage.summary
    assert tuning.view.elapsed_s <= 1.2 * 180
    assert result.report is not None


def test_phase_gets_its_least_time(stages):
    # What a stage takes at least it may take, even if its share is less.
    stages.run(minutes=3.5)
    assert stages.minutes["workers", "a"] * 60 == pytest.approx(
        least_s("workers", ASSUMED_TRIAL_S["cpu"], 2.0)
    )


def test_next_steps_depend_on_nodes(tmp_path):
    path = tmp_path / "my profile.toml"
    path.write_text(profile_to_toml(example_profile()))
    steps_of_one_node = next_steps([path], nodes=1)
    steps_of_four_nodes = next_steps([path], nodes=4)
    assert (steps_of_one_node[0], steps_of_one_node[-1]) == (
        f"autotune advise '{path}'",
        f"autotune train '{path}'",
    )
    assert [step.split()[1] for step in steps_of_four_nodes] == [
        "advise",
        "profile",
        "network",
        "plan",
        "train",
    ]
    assert "the network between nodes was not measured" in steps_of_four_nodes[2]


@pytest.mark.parametrize(
    ("minutes", "changes", "calls"),
    [
        (
            10.0,
            {},
            [
                "network a",
                "confirm a",
                "baseline a",
                "network b",
                "confirm b",
                "baseline b",
                "report ",
            ],
        ),
        (1.0, {"repeated": [], "report": None}, ["network a", "network b"]),
        (
            1.0,
            {"repeated": ["baseline"], "report": None},
            ["network a", "baseline a", "network b", "baseline b"],
        ),
        # The example has evidence of its workers: nothing removed it.
        (
            1.0,
            {"repeated": ["workers"], "report": None},
            ["network a", "network b"],
        ),
    ],
    ids=["all", "network only", "with baseline", "settings stay"],
)
def test_job_between_nodes_measures_the_network(
    stages, monkeypatch, tmp_path, minutes, changes, calls
):
    monkeypatch.setattr(between_nodes, "nodes_here", lambda: 2)
    monkeypatch.setattr(between_nodes, "SystemClock", lambda: stages.clock)
    paths = [
        tmp_path / "p" / f"{probe.config.model.name}-cpu.toml"
        for probe in stages.request.subjects.probes
    ]
    for path, probe in zip(paths, stages.request.subjects.probes, strict=True):
        left_at(path, probe.config.model)
    written = {
        "profiles": list(map(str, paths)),
        "report": "r/report.html",
        "repeated": ["confirm", "baseline"],
    } | changes
    (tmp_path / "tune-7.json").write_text(json.dumps(written))
    request = SweepRequest(
        data=tmp_path / "data", reports=tmp_path / "r", budget_s=60 * minutes
    )
    result = measure_between_nodes(tmp_path / "tune-7.json", request)
    assert [" ".join(call) for call in stages.calls] == calls
    assert (stages.nodes, stages.minutes["network", "a"]) == (2, minutes)
    assert stages.minutes.get(("baseline", "a")) in (
        None,
        min(REPEATED_MINUTES, minutes),
    )
    assert (result.profiles, result.report) == (
        tuple(map(str, paths)),
        written["report"],
    )
    took_s = {
        "network": (20.0, RANKS_S),
        # One session, with its server, runs both repeated phases.
        "confirm": (8.0, 0.0),
        "baseline": (10.0, SERVER_S),
        "report": (0.0, 0.0),
    }
    both = [took_s[call[0]] for call in stages.calls]
    assert (result.seconds, result.seconds_in_children) == tuple(
        map(sum, zip(*both, strict=True))
    )
    assert "autotune train" in result.next_steps[-1]
    assert "--nodes 2" in result.next_steps[-1]
