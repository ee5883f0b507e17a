"""The study that a joint search begins with, from the windows of a sweep."""

import optuna
import pytest

from autotune.profiles.store import with_data
from autotune.subjects.mlm.workers.windows import training_trial
from autotune.trials.outcomes import Crashed
from autotune.trials.values import Trial
from autotune.workers.joint_study import study_of
from autotune.workers.measure import NamedWindow
from testbed.examples.feeds import CONFIG, FeedMachine, knee_at, sweep_on

TWO_SUFFICE = knee_at(2)
"""Rate of a feed of which two workers keep up with the step."""
LATE_ROUND = 100
"""Number of a round after all rounds of a sweep."""


@pytest.fixture
def finished(tmp_path):
    """Return a finished sweep of a step that two workers keep up with."""
    sweep = sweep_on(FeedMachine(TWO_SUFFICE), tmp_path)
    sweep.run()
    return sweep


def study_after(sweep, varied=("prefetch_factor",)):
    """Return the study that a joint search after a sweep begins with."""
    return study_of(sweep.runner.finished, sweep.max_workers, varied)


def test_study_has_settings_of_windows_with_workers(finished):
    counts = [count for count in finished.runner.machine.counts if count is not None]
    assert [trial.params for trial in study_after(finished).trials] == [
        {"num_workers": count, "prefetch_factor": CONFIG.data.prefetch_factor}
        for count in counts
    ]


def test_study_maximises_ratio_to_cached_batches(finished):
    study = study_after(finished)
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    expected = []
    for trial in study.trials:
        settings = {"num_workers": trial.params["num_workers"]}
        expected.append(TWO_SUFFICE(CONFIG.data.model_copy(update=settings)))
    assert max(expected) == 1.0
    # The windows of each ratio have noise of up to 0.1 %.
    assert [trial.value for trial in study.trials] == pytest.approx(expected, rel=0.005)


def test_study_on_a_gpu_includes_pinning(finished):
    study = study_after(finished, ("prefetch_factor", "pin_memory"))
    assert {trial.params["pin_memory"] for trial in study.trials} == {True}


def test_study_ignores_windows_outside_its_space(finished):
    known = len(study_after(finished).trials)
    in_space = {"num_workers": 1, "prefetch_factor": 4}
    settings_by_name = {
        "prefetch factor that is not searched": in_space | {"prefetch_factor": 3},
        "more workers than are allowed": in_space | {"num_workers": 50},
        "settings in the space": in_space,
    }
    cached = training_trial(finished.windows, CONFIG, LATE_ROUND, [], cached=True)
    windows = [NamedWindow(name="cached batches", trial=cached)]
    for name, settings in settings_by_name.items():
        config = with_data(CONFIG, settings)
        trial = training_trial(finished.windows, config, LATE_ROUND, [])
        windows.append(NamedWindow(name=name, trial=trial))
    finished.measure_windows(LATE_ROUND, windows)
    added = study_after(finished).trials[known:]
    assert [trial.params for trial in added] == [in_space]


def test_study_ignores_rounds_without_cached_batches(finished):
    known = len(study_after(finished).trials)
    config = with_data(CONFIG, {"num_workers": 1})
    trial = training_trial(finished.windows, config, LATE_ROUND, [])
    window = NamedWindow(name="without cached batches", trial=trial)
    finished.measure_windows(LATE_ROUND, [window])
    assert len(study_after(finished).trials) == known


def test_study_ignores_crashed_windows(tmp_path):
    def crash_without_config(trial):
        return None if trial.config else Crashed(detail="boom")

    sweep = sweep_on(FeedMachine(TWO_SUFFICE, crash_without_config), tmp_path)
    sweep.run()
    known = len(study_after(sweep).trials)
    # A request without settings, which would fail if the study read it.
    crashing = Trial(job="window", measured={"cached": False}, timeout_s=1)
    sweep.runner.run(crashing, "crashes")
    assert len(study_after(sweep).trials) == known
