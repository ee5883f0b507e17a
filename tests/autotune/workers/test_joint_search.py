"""The joint search over loader settings, after a sweep on a simulated feed."""

from dataclasses import replace

import optuna
import pytest

from autotune.profiles.store import with_data
from autotune.trials.outcomes import Crashed
from autotune.trials.values import Trial
from autotune.workers.count_sweep import NamedWindow
from autotune.workers.joint_search import gap_remains, search_joint, study_of
from autotune.workers.measure import evidence, training_trial
from testbed.examples.feeds import (
    CONFIG,
    DEAD_WORKER,
    LIMITS,
    ON_CPU,
    FeedMachine,
    knee_at,
    loader_settings,
    sweep_on,
)

FEW_WORKERS = replace(LIMITS, requested_workers=3)
SPEEDUP = 1.5
"""Speedup by the largest prefetch factor, if prefetching helps."""
TRIALS = 15
"""Number of settings to try, enough to meet the best ones."""
FEW_TRIALS = 6
"""Number of settings to try if none is better."""


def prefetching_helps(data) -> float:
    """Return a rate that is half as high again with the largest prefetch factor."""
    rate = prefetching_is_useless(data)
    return SPEEDUP * rate if data.prefetch_factor == 8 else rate


def prefetching_is_useless(data) -> float:
    """Return a rate that depends on the number of workers only.

    It is the share of the throughput on cached batches, of which three workers reach
    61 %. Without workers it is not 0.
    """
    return 0.2 * data.num_workers + 0.01


def finished_sweep(rate, directory, limits=FEW_WORKERS):
    """Return a sweep on a machine of this rate, and its choice."""
    sweep = sweep_on(FeedMachine(rate), directory, limits=limits)
    return sweep, sweep.run()


def settings_of(sweep):
    return [loader_settings(window.trial) for window in sweep.runner.finished]


def test_joint_search_adopts_faster_settings(tmp_path):
    sweep, choice = finished_sweep(prefetching_helps, tmp_path)
    joint = search_joint(sweep, choice, trials=TRIALS)
    assert joint.adopted
    assert joint.num_workers == 3
    assert joint.prefetch_factor == 8
    # Windows have noise of 0.2 %.
    assert joint.ratio_to_workers_alone == pytest.approx(SPEEDUP, rel=0.01)
    assert 1 < joint.ratio_low <= joint.ratio_to_workers_alone


def test_joint_search_without_gpu_leaves_pinning_as_it_was(tmp_path):
    sweep, choice = finished_sweep(prefetching_helps, tmp_path)
    search_joint(sweep, choice, trials=TRIALS)
    assert CONFIG.data.pin_memory
    assert {data["pin_memory"] for data in settings_of(sweep)} == {True}


def test_joint_search_repeats_from_its_trial_log(tmp_path):
    sweep, choice = finished_sweep(prefetching_helps, tmp_path)
    joint = search_joint(sweep, choice, trials=TRIALS)
    again, same_choice = finished_sweep(prefetching_helps, tmp_path)
    assert search_joint(again, same_choice, trials=TRIALS) == joint
    assert again.runner.machine.trials == []


def test_gap_remains_if_no_count_suffices(tmp_path):
    _, choice = finished_sweep(prefetching_is_useless, tmp_path)
    assert gap_remains(choice)


def test_no_gap_remains_if_a_count_suffices(tmp_path):
    _, choice = finished_sweep(knee_at(2), tmp_path)
    assert not gap_remains(choice)


def test_joint_search_without_trials_chooses_nothing(tmp_path):
    sweep, choice = finished_sweep(prefetching_is_useless, tmp_path)
    assert search_joint(sweep, choice, trials=0) is None


def test_joint_search_rejects_settings_that_are_not_faster(tmp_path):
    sweep, choice = finished_sweep(prefetching_is_useless, tmp_path)
    before = evidence(sweep, choice, ON_CPU)
    assert not search_joint(sweep, choice, trials=FEW_TRIALS).adopted
    after = evidence(sweep, choice, ON_CPU)
    assert after.chosen == before.chosen
    assert after.rows == before.rows
    assert after.choice == before.choice


def test_joint_search_pairs_trials_with_cached_batches(tmp_path):
    sweep, choice = finished_sweep(prefetching_is_useless, tmp_path)
    swept_windows = len(sweep.runner.finished)
    search_joint(sweep, choice, trials=FEW_TRIALS)
    searched = [trial.trial.measured for trial in sweep.runner.finished[swept_windows:]]
    # Rounds of the search follow those of the sweep.
    for number in range(FEW_TRIALS):
        first, second = searched[2 * number : 2 * number + 2]
        assert {first["cached"], second["cached"]} == {True, False}
        assert first["round"] == second["round"] == len(sweep.rounds) + number


def test_joint_search_skips_settings_that_exceed_memory(tmp_path):
    # Shared memory holds 16 batches, of which 90 % may be used: three workers fit with
    # a prefetch factor of 2, but not with 4 or 8.
    host = replace(LIMITS.host, shm_free_bytes=16 * LIMITS.batch_bytes)
    tight = replace(FEW_WORKERS, host=host)
    sweep, choice = finished_sweep(prefetching_helps, tmp_path, limits=tight)
    search_joint(sweep, choice, trials=TRIALS)
    for data in settings_of(sweep):
        limits = replace(tight, prefetch_factor=data["prefetch_factor"])
        assert limits.shortage(data["num_workers"]) is None
    # Fewer workers fit with larger factors, so several factors are tried.
    assert len({data["prefetch_factor"] for data in settings_of(sweep)}) > 1


def test_joint_search_leaves_out_dying_workers(tmp_path):
    def die_by_prefetching(trial):
        return DEAD_WORKER if loader_settings(trial)["prefetch_factor"] == 8 else None

    machine = FeedMachine(prefetching_helps, die_by_prefetching)
    sweep = sweep_on(machine, tmp_path, limits=FEW_WORKERS)
    joint = search_joint(sweep, sweep.run(), trials=TRIALS)
    assert joint.prefetch_factor != 8
    assert not joint.adopted


@pytest.fixture
def finished(tmp_path):
    """Return a finished sweep of a step that two workers keep up with."""
    sweep = sweep_on(FeedMachine(knee_at(2)), tmp_path)
    sweep.run()
    return sweep


def study_after(sweep, *, pinning=False):
    """Return the study that a joint search after a sweep begins with."""
    return study_of(sweep.runner.finished, sweep.max_workers, pinning=pinning)


def test_study_holds_ratios_to_cached_batches(finished):
    study = study_after(finished)
    counts = [count for count in finished.runner.machine.counts if count is not None]
    assert [trial.params["num_workers"] for trial in study.trials] == counts
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    for trial in study.trials:
        assert len(trial.params) == 2
        assert trial.params["prefetch_factor"] == 2
        count = trial.params["num_workers"]
        data = CONFIG.data.model_copy(update={"num_workers": count})
        assert trial.value == pytest.approx(knee_at(2)(data), rel=0.005)


def test_study_on_a_gpu_includes_pinning(finished):
    study = study_after(finished, pinning=True)
    assert {trial.params["pin_memory"] for trial in study.trials} == {True}


def test_study_ignores_windows_outside_its_space(finished):
    known = len(study_after(finished).trials)
    round_number = 101  # after all rounds of the sweep
    cached = training_trial(finished.training, CONFIG, round_number, [], cached=True)
    windows = [NamedWindow(name="cached batches", trial=cached)]
    for name, num_workers, prefetch_factor in (
        ("prefetch factor that is not searched", 1, 3),
        ("more workers than are allowed", 50, 2),
        ("settings in the space", 1, 4),
    ):
        settings = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        config = with_data(CONFIG, settings)
        trial = training_trial(finished.training, config, round_number, [])
        windows.append(NamedWindow(name=name, trial=trial))
    finished.measure_windows(round_number, windows)
    added = study_after(finished).trials[known:]
    assert [trial.params for trial in added] == [
        {"num_workers": 1, "prefetch_factor": 4}
    ]


def test_study_ignores_rounds_without_cached_batches(finished):
    known = len(study_after(finished).trials)
    config = with_data(CONFIG, {"num_workers": 1})
    round_number = 100  # after all rounds of the sweep
    trial = training_trial(finished.training, config, round_number, [])
    window = NamedWindow(name="without cached batches", trial=trial)
    finished.measure_windows(round_number, [window])
    assert len(study_after(finished).trials) == known


def test_study_ignores_crashed_windows(tmp_path):
    def crash_without_config(trial):
        return None if "config" in trial.measured else Crashed(detail="boom")

    sweep = sweep_on(FeedMachine(knee_at(2), crash_without_config), tmp_path)
    sweep.run()
    known = len(study_after(sweep).trials)
    # A request without settings: the study does not even read it.
    crashing = Trial(job="training", measured={"cached": False}, timeout_s=1)
    sweep.runner.run(crashing, "crashes")
    assert len(study_after(sweep).trials) == known
