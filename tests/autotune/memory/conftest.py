"""Probes of a simulated model, which may run out of time."""

import pytest

from autotune.errors import OutOfTime
from autotune.trials.runner import TrialRunner
from testbed.fakes import FakeMachine
from tests.autotune.memory.simulated_probes import Prober, simulate


@pytest.fixture
def probe(tmp_path):
    """Return a function that probes a model on a simulated machine."""
    return Prober(tmp_path)


@pytest.fixture
def probe_with_trials(probe, monkeypatch):
    """Return a function that probes with only enough time for a number of trials."""
    run_trial = TrialRunner.run

    def probe_in_time(max_trials):
        machine = FakeMachine(simulate)

        def run(runner, trial, label, **options):
            if len(machine.trials) >= max_trials:
                raise OutOfTime("3 s are left", next_step="more time")
            return run_trial(runner, trial, label, **options)

        monkeypatch.setattr(TrialRunner, "run", run)
        # A trial log of its own, so that no trial is known already.
        return probe(machine, site=f"time for {max_trials} trials")

    return probe_in_time
