"""Runners that only hold a trial log, for tests of the evidence that rests on it."""

from autotune.trials.outcomes import Outcome
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import TrialLog
from autotune.trials.values import Trial
from testbed.fakes import FakeClock, FakeMachine


def runner_with(trial_log: TrialLog) -> TrialRunner:
    """Return a runner with a trial log, which must not run a trial."""
    return TrialRunner(
        machine=FakeMachine(_reject_trial),
        trial_log=trial_log,
        site="here",
        clock=FakeClock(),
    )


def _reject_trial(trial: Trial) -> Outcome:
    raise AssertionError(f"ran {trial}")
