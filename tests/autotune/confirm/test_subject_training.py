"""Training by functions of yours is confirmed as that of the bundled trainer."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.confirm.decide import confirmed_words
from autotune.confirm.sections import confirm_text
from autotune.confirm.stage import confirm_profile
from autotune.confirm.subject_training import training_of
from autotune.errors import BadInput, ProfileRejected, UsageError
from autotune.profiles.recorded_trials import read_trials
from autotune.profiles.store import read_profile, write_profile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.own.subject import FunctionSubject
from autotune.trials import trial_bench
from autotune.trials.outcomes import Crashed, Measured
from autotune.trials.sweep_request import SweepRequest
from testbed.examples.feeds import ON_CPU
from testbed.examples.own_profiles import own_profile
from testbed.examples.trials import WINDOW_FIGURES
from testbed.fakes import FakeClock, FakeHost, FakeMachine

RATE = 10.0
KERNEL_FIGURES = {
    "kernels": [{"name": "aten::mm", "calls": 2.0, "seconds": 0.01, "bound_s": 0.008}],
    "units_per_step": 7.0,
    "step_s": 0.02,
    "roofline": {"bytes_per_s": 1e10, "flops_per_s": 1e11},
}
DELIVERED = 9.9


class OwnTraining:
    """A profile of your code, and a machine on which its training is computed."""

    def __init__(self, directory: Path, clock: FakeClock):
        self.directory = directory
        self.clock = clock
        self.path = directory / "own.toml"
        self.failure = None
        self.steps = 20
        self.machine = FakeMachine(self.outcome)
        self.subject = FunctionSubject.from_table(own_profile().subject.table)

    def outcome(self, trial):
        self.clock.sleep(2.0)
        if self.failure is not None:
            return self.failure
        if trial.job == "short_training":
            rate = DELIVERED if self.steps else None
            figures = {
                "tokens_per_s": rate,
                "steps": self.steps,
                "seconds": 2.0,
                "mfu": None,
            }
            return Measured(figures=figures)
        if trial.job == "kernels":
            return Measured(figures=KERNEL_FIGURES)
        rate = RATE * (1 + 0.001 * (trial.measured["round"] % 3))
        unit = "batches" if trial.measured["loader"] else trial.measured["unit"]
        return Measured(
            figures=WINDOW_FIGURES
            | {"unit": unit, "units_per_s": rate, "padded_units_per_s": rate}
        )

    def bench(self, **changes) -> SubjectBench:
        site = replace(ON_CPU, host=FakeHost().facts([self.directory]))
        server = SimpleNamespace(versions={"cuda": None}, waited_s=0.0, environment={})
        fields = {
            "site": site,
            "server": server,
            "machine": self.machine,
            "subject": self.subject,
            "sources": own_profile().subject.sources,
            "directory": self.directory,
        }
        return SubjectBench(**fields | changes)

    def confirmed(self, *, trains=False, **changes):
        """Confirm the profile, and return the evidence."""
        bench = self.bench(**changes)
        profile = own_profile()
        probe = profile.evidence.probe.model_copy(update={"trains": trains})
        profile = profile.model_copy(
            update={
                "fingerprint": bench.fingerprint,
                "evidence": profile.evidence.model_copy(update={"probe": probe}),
            }
        )
        write_profile(self.path, profile)
        request = SweepRequest(reports=self.directory / "r", budget_s=60.0)
        training = training_of(bench, read_profile(self.path), request)
        return confirm_profile(training, budget_s=60.0, training_s=6.0)


@pytest.fixture
def own(tmp_path, monkeypatch) -> OwnTraining:
    clock = FakeClock()
    monkeypatch.setattr(trial_bench, "SystemClock", lambda: clock)
    return OwnTraining(tmp_path, clock)


def test_promises_and_delivers_with_the_tuned_settings(own):
    evidence = own.confirmed()
    assert evidence.unit == "batches"
    assert len(evidence.rows) == 1
    assert evidence.rows[0].micro_batch_size == 7
    assert evidence.num_workers == 1
    assert (evidence.delivered.tokens_per_s, evidence.not_verified) == (DELIVERED, None)
    assert confirmed_words(evidence).startswith("promised 10.01 batches/s")
    for trial in own.machine.trials:
        if trial.job != "kernels":
            assert trial.step_arguments["batch"] == 7
            assert trial.loader_arguments["num_workers"] == 1
    assert [trial.job for trial in own.machine.trials].count("short_training") == 1


def test_evidence_is_in_the_profile_and_matches_its_trials(own):
    evidence = own.confirmed()
    stored = read_profile(own.path)
    assert stored.intact
    assert stored.profile.evidence.confirm == evidence
    assert stored.profile.provenance.commands == ["probe", "workers", "confirm"]
    check = read_trials(own.path, stored.profile, own.directory / "r").check
    assert not [name for name in check.unfounded if "confirm" in name]
    text = confirm_text(evidence, stored)
    assert "delivered 9.9" in text
    assert "batches/s" in text


def test_kernels_of_the_step_are_profiled(own):
    evidence = own.confirmed()
    (trial,) = [trial for trial in own.machine.trials if trial.job == "kernels"]
    assert (trial.measured["size"], trial.measured["device"]) == (7, "cpu")
    assert evidence.kernels.micro_batch_size == 7
    assert evidence.kernels.bound_s == pytest.approx(0.008)
    assert evidence.not_profiled is None


def test_training_function_runs_by_itself(own):
    evidence = own.confirmed(trains=True, step_parameters=frozenset({"batch"}))
    assert {trial.measured["loader"] is None for trial in own.machine.trials} == {True}
    assert evidence.unit == "samples"
    assert "training loop" in evidence.not_profiled
    assert "num_workers 1" in evidence.not_verified
    assert "num_workers 1" in confirm_text(evidence, read_profile(own.path))


def test_training_function_that_takes_workers_is_verified(own):
    evidence = own.confirmed(
        trains=True, step_parameters=frozenset({"batch", "num_workers"})
    )
    assert evidence.not_verified is None


def test_too_short_a_training_delivers_nothing(own):
    own.steps = 0
    evidence = own.confirmed()
    assert evidence.delivered is None
    assert "too short" in evidence.not_delivered


def test_failing_code_is_named(own):
    own.failure = Crashed(detail="ValueError: no data")
    with pytest.raises(BadInput, match=r"mine:build_step.*ValueError"):
        own.confirmed()


def test_step_without_loader_cannot_be_confirmed(own):
    own.subject = own.subject.model_copy(update={"loader_function": None})
    with pytest.raises(UsageError, match="has no loader"):
        own.confirmed()


def test_changed_source_is_rejected(own):
    bench = own.bench()
    profile = own_profile().model_copy(update={"fingerprint": bench.fingerprint})
    write_profile(own.path, profile)
    changed = replace(bench, sources={"step": "0" * 64, "loader": "0" * 64})
    request = SweepRequest(reports=own.directory / "r", budget_s=60.0)
    with pytest.raises(ProfileRejected, match="source have changed"):
        training_of(changed, read_profile(own.path), request)
