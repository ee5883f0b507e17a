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
def probe_within(probe, monkeypatch):
    """Return a function that probes with time for a number of trials."""
    run_trial = TrialRunner.run

    def probe_in_time(most_trials):
        machine = FakeMachine(simulate)

        def run(runner, trial, label, **options):
            if len(machine.trials) >= most_trials:
                raise OutOfTime("3 s are left", next_step="more time")
            return run_trial(runner, trial, label, **options)

        monkeypatch.setattr(TrialRunner, "run", run)
        return probe(machine, site=f"within {most_trials}")

    return probe_in_time
