"""A tuning of your own code: its phases, and those that it cannot have."""

import contextlib
from types import SimpleNamespace

import pytest

from autotune.memory.subject_probe import SubjectProbeRequest
from autotune.profiles.store import WrittenProfile, read_profile, write_profile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.own.subject import FunctionSubject
from autotune.tune import pipeline
from autotune.tune import subjects as tuned_subjects
from autotune.tune.pipeline import TuneRequest, Tuning
from autotune.tune.subjects import SubjectsToTune, TunedSubject
from testbed.examples.own_profiles import own_profile
from testbed.examples.profiles import example_profile
from testbed.fakes import FakeClock
from tests.autotune.tune.benches import probe_request
from tests.autotune.tune.test_pipeline import CONFIRMED
from tests.autotune.tune.test_sections import worth

FUNCTIONS = {"step_function": "mine:build_step", "loader_function": "mine:build_loader"}


class Phases:
    """Functions of the phases, which only record calls and take time."""

    def __init__(self, directory):
        self.directory = directory
        self.clock = FakeClock()
        self.calls = []
        self.trains = False

    def done(self, phase):
        self.calls.append(phase)
        self.clock.sleep(5.0)

    def probe_one(self, bench, probe, path, traced, *, ends_s):
        self.done("probe")
        profile = own_profile()
        evidence = profile.evidence.probe.model_copy(update={"trains": self.trains})
        profile = profile.model_copy(
            update={"evidence": profile.evidence.model_copy(update={"probe": evidence})}
        )
        write_profile(path, profile)
        return WrittenProfile(path=path, profile=profile)

    def prepare(self, request, bench):
        return SimpleNamespace(
            request=request,
            subject=request.subject,
            local_ranks=1,
            size_probe=lambda: SimpleNamespace(trace=None),
        )

    def explore(self, step):
        self.done("explore")
        return SimpleNamespace(choice="nothing is faster")

    def sweep_loader(self, bench, stored, request, path):
        self.done("workers")
        swept = example_profile().evidence.workers
        evidence = stored.profile.evidence.model_copy(update={"workers": swept})
        return WrittenProfile(
            path=path, profile=stored.profile.model_copy(update={"evidence": evidence})
        )

    def confirm_profile(self, training, *, budget_s, training_s):
        self.done("confirm")
        self.training_s = training_s
        return CONFIRMED.model_copy(update={"unit": "batches"})

    def compare_recipes(self, bench, stored, request, *, left_out):
        self.done("baseline")
        return worth(example_profile()).evidence.baseline

    def build_report(self, profiles, reports, out, *, data):
        self.done("report")
        self.reported = profiles, data

    @contextlib.contextmanager
    def open_subject(self, device, subject, directory, *, import_timeout_s, check):
        yield SubjectBench(
            site=SimpleNamespace(name="cpu", device="cpu"),
            subject=subject,
            server=SimpleNamespace(waited_s=0.0),
            machine=SimpleNamespace(),
        )

    def run(self, *subjects, **changes):
        probes = tuple(
            SubjectProbeRequest(subject=subject, reports=self.directory / "r")
            for subject in subjects
        )
        request = TuneRequest(
            subjects=SubjectsToTune(probes=probes),
            out=self.directory / "p",
            device="cpu",
            minutes=20.0,
            **changes,
        )
        self.tuning = Tuning(request=request, clock=self.clock)
        result = self.tuning.run()
        return result, {
            (stage.name, stage.model): (stage.status, stage.summary)
            for stage in result.stages
        }


@pytest.fixture
def phases(tmp_path, monkeypatch):
    recorded = Phases(tmp_path)
    for name in (
        "probe_one",
        "explore",
        "sweep_loader",
        "confirm_profile",
        "compare_recipes",
        "open_subject",
    ):
        monkeypatch.setattr(tuned_subjects, name, getattr(recorded, name))
    monkeypatch.setattr(tuned_subjects, "training_of", lambda *_: None)

    def prepare(request, bench):
        return recorded.prepare(request, bench)

    monkeypatch.setattr(SubjectProbeRequest, "prepare", prepare)
    monkeypatch.setattr(pipeline, "build_report", recorded.build_report)
    (tmp_path / "p").mkdir()
    return recorded


def test_phases_run_in_order_until_the_report(phases):
    subject = FunctionSubject(**FUNCTIONS, varied={"fused": [False, True]})
    result, found = phases.run(subject)
    assert phases.calls == [
        "probe",
        "explore",
        "workers",
        "confirm",
        "baseline",
        "report",
    ]
    assert found["probe", "mine"] == (
        "done",
        "largest: batch=8; out of memory at 9; fastest 7",
    )
    assert found["confirm", "mine"] == (
        "done",
        "promised 1,000 batches/s (980 to 1,020) · delivered 995",
    )
    assert phases.training_s == 60.0
    (path,) = result.profiles
    assert phases.reported[1] is None
    assert [step.split()[1:3] for step in result.next_steps] == [
        ["profile", "show"],
        ["advise", path],
        ["profile", "approve"],
    ]
    assert read_profile(phases.tuning.tuned[0]).path.name == path.rpartition("/")[2]


def test_phases_that_code_cannot_have_say_why(phases):
    subject = FunctionSubject(step_function="mine:build_step")
    _, found = phases.run(subject)
    skipped = {
        name: summary
        for (name, _), (status, summary) in found.items()
        if status == "skipped"
    }
    assert set(skipped) == {
        "estimate",
        "explore",
        "workers",
        "network",
        "confirm",
    }
    assert "build_model" in skipped["estimate"]
    assert "--vary" in skipped["explore"]
    assert "--loader" in skipped["workers"]
    assert "loader" in skipped["confirm"]
    assert phases.calls == ["probe", "baseline", "report"]


def test_training_function_is_confirmed_without_a_loader(phases):
    phases.trains = True
    _, found = phases.run(FunctionSubject(step_function="mine:train"))
    assert found["confirm", "mine-train"][0] == "done"
    assert found["workers", "mine-train"][0] == "skipped"


def test_each_combination_of_arguments_is_tuned(phases):
    subjects = [
        FunctionSubject(**FUNCTIONS, arguments={"width": width}) for width in (1, 2)
    ]
    result, _ = phases.run(*subjects, skip=frozenset({"explore"}))
    assert phases.calls == [
        "probe",
        "probe",
        *["workers", "confirm", "baseline"] * 2,
        "report",
    ]
    assert len(result.profiles) == 2


def test_settings_that_you_fixed_are_not_searched():
    code = FunctionSubject(
        **FUNCTIONS, arguments={"fused": True}, varied={"fused": [False, 1]}
    )
    tuned = TunedSubject(
        bench=SimpleNamespace(subject=code),
        path=None,
        request=SubjectProbeRequest(subject=code, reports=None),
        probe_on_machine=None,
    )
    assert "--vary" in tuned.missing("explore", 1)


@pytest.mark.parametrize("phase", ["explore", "workers", "confirm", "baseline"])
def test_bundled_trainer_has_every_phase(tmp_path, patterned_dataset, phase):
    request = probe_request(tmp_path, patterned_dataset)
    tuned = TunedSubject(
        bench=SimpleNamespace(subject=request.requested_subject()),
        path=tmp_path / "p.toml",
        request=request,
        probe_on_machine=None,
    )
    assert tuned.missing(phase, 1) == ""
