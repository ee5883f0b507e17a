"""The settings that your own code declares are searched, probed and adopted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.memory.stage import probe_one
from autotune.memory.subject_probe import SubjectProbeRequest
from autotune.profiles.store import read_profile
from autotune.search.stage import FOUND, explore
from autotune.search.step import SearchedStep, present_settings
from autotune.subjects.bench import SubjectBench
from autotune.subjects.own.subject import FunctionSubject
from autotune.subjects.transformers.subject import TransformersSubject
from autotune.trials import trial_bench
from autotune.trials.outcomes import Measured, OutOfMemory
from autotune.trials.sweep_request import SweepRequest
from testbed.examples.feeds import ON_CPU
from testbed.examples.own_profiles import own_profile
from testbed.examples.trials import STEP_FIGURES, WINDOW_FIGURES
from testbed.fakes import FakeClock, FakeHost, FakeMachine

BYTES_PER_SIZE = 10**6
BUDGET_BYTES = 40 * BYTES_PER_SIZE
"""Budget in which 40 fit."""


class OwnSearch:
    """A probed step of yours, on a machine on which fused kernels are faster."""

    def __init__(self, directory, clock):
        self.directory, self.clock = directory, clock
        self.machine = FakeMachine(self.outcome)
        self.speedup = 1.5
        self.bytes_of_fused = 1.0

    def outcome(self, trial):
        self.clock.sleep(2.0)
        if trial.job == "window":
            arguments = trial.step_arguments
            faster = self.speedup if arguments["fused"] else 1.0
            rate = 1000.0 * faster * arguments["size"] / (arguments["size"] + 4)
            return Measured(
                figures=WINDOW_FIGURES
                | {
                    "unit": "samples",
                    "units_per_s": rate,
                    "padded_units_per_s": rate,
                }
            )
        arguments, size = trial.measured["arguments"], trial.measured["size"]
        factor = self.bytes_of_fused if arguments["fused"] else 1.0
        peak_bytes = round(size * BYTES_PER_SIZE * factor)
        budget_bytes = trial.measured["memory_budget_bytes"]
        if budget_bytes is not None and peak_bytes > budget_bytes:
            return OutOfMemory(detail="too large")
        step_s = 0.001 * (size + 4)
        return Measured(
            figures=STEP_FIGURES
            | {
                "step_s": [step_s] * 4,
                "units_per_step": float(size),
                "peak_bytes": peak_bytes,
                "step_peak_bytes": [peak_bytes] * 3,
                "kept_bytes": [1000] * 3,
            }
        )

    def run(self, **changes):
        subject = FunctionSubject(
            step_function="mine:build_step",
            along="size",
            varied={"fused": [False, True]},
            **changes,
        )
        site = replace(ON_CPU, host=FakeHost().facts([self.directory]))
        server = SimpleNamespace(versions={"cuda": None}, waited_s=0.0, environment={})
        bench = SubjectBench(
            site=site,
            server=server,
            machine=self.machine,
            subject=subject,
            sources={"step": "0" * 64},
            directory=self.directory,
        )
        probe = SubjectProbeRequest(
            subject=subject,
            reports=self.directory / "r",
            memory_bytes=BUDGET_BYTES,
            max_size=256,
        )
        path = self.directory / "p.toml"
        probe_one(bench, probe.prepare(bench), path)
        request = SweepRequest(
            reports=self.directory / "r", budget_s=600.0, window_s=1.0
        )
        step = SearchedStep(
            bench=bench, stored=read_profile(path), probe=probe, sweep=request
        )
        evidence = explore(step)
        return read_profile(path), evidence


@pytest.fixture
def search(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(trial_bench, "SystemClock", lambda: clock)
    return OwnSearch(tmp_path, clock)


def test_winner_is_probed_and_written(search):
    stored, evidence = search.run()
    assert evidence.adopted
    assert stored.intact
    assert stored.profile.settings["fused"] is True
    assert stored.profile.settings["size"] == evidence.chosen.settings["size"]
    probe = stored.profile.evidence.probe
    assert (probe.feasible_max, probe.infeasible_min) == (40, 41)
    assert probe.choice == FOUND
    assert stored.profile.evidence.explore == evidence
    assert stored.profile.subject.table["varied"] == {"fused": [False, True]}
    probed = [
        trial.measured["arguments"]["fused"]
        for trial in search.machine.trials
        if trial.job == "step"
    ]
    assert set(probed) == {False, True}


def test_windows_have_the_batches_of_the_probe(search):
    search.run()
    windows = [trial for trial in search.machine.trials if trial.job == "window"]
    for trial in windows:
        size = trial.step_arguments["size"]
        assert trial.measured["loader"] is None
        assert trial.measured.get("units_per_micro_batch", 1.0) == size


def test_slower_settings_leave_the_profile_as_it_is(search):
    search.speedup = 0.8
    stored, evidence = search.run()
    assert not evidence.adopted
    assert "fused" not in stored.profile.settings


def test_winner_that_needs_more_memory_gets_a_smaller_size(search):
    search.bytes_of_fused = 2.0
    stored, evidence = search.run()
    probe = stored.profile.evidence.probe
    if evidence.adopted:
        assert probe.feasible_max == 20
        assert stored.profile.settings["size"] <= 20
    else:
        assert "headroom" in evidence.choice or "verified" in evidence.choice


def test_present_values_are_those_that_the_step_reports():
    profile = own_profile()
    reported = {"bf16": True, "torch_compile": False}
    probe = profile.evidence.probe.model_copy(update={"settings": reported})
    evidence = profile.evidence.model_copy(update={"probe": probe})
    profile = profile.model_copy(update={"evidence": evidence})
    subject = TransformersSubject(step_function="mine:make_trainer")
    present = present_settings(profile, SimpleNamespace(subject=subject))
    assert present == reported | {"gradient_checkpointing": False}
