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


def prefetching_helps(data) -> float:
    """Return a rate that is half as high again if much is prefetched.

    Three workers reach 61 % of cached batches at most without.
    """
    factor = 1.5 if data.prefetch_factor == 8 else 1.0
    return 0.2 * data.num_workers * factor + 0.01


def prefetching_is_useless(data) -> float:
    """Return a rate that depends on the number of workers only."""
    return 0.2 * data.num_workers + 0.01


def finished_sweep(rate, directory, limits=FEW_WORKERS):
    """Return a sweep on a machine of this rate, and its choice."""
    sweep = sweep_on(FeedMachine(rate), directory, limits=limits)
    return sweep, sweep.run()


def settings_of(sweep):
    return [loader_settings(window.trial) for window in sweep.runner.finished]


def test_joint_search_adopts_faster_settings(tmp_path):
    sweep, choice = finished_sweep(prefetching_helps, tmp_path)
    joint = search_joint(sweep, choice, trials=15)
    assert joint.adopted
    assert joint.num_workers == 3
    assert joint.prefetch_factor == 8
    assert joint.ratio_to_workers_alone == pytest.approx(1.5, rel=0.03)
    assert 1 < joint.ratio_low <= joint.ratio_to_workers_alone
    # As it was: there is no GPU.
    assert {data["pin_memory"] for data in settings_of(sweep)} == {True}


def test_joint_search_repeats_from_its_trial_log(tmp_path):
    sweep, choice = finished_sweep(prefetching_helps, tmp_path)
    joint = search_joint(sweep, choice, trials=15)
    again, same_choice = finished_sweep(prefetching_helps, tmp_path)
    assert search_joint(again, same_choice, trials=15) == joint
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
    assert not search_joint(sweep, choice, trials=6).adopted
    after = evidence(sweep, choice, ON_CPU)
    assert after.chosen == before.chosen
    assert after.rows == before.rows
    assert after.choice == before.choice


def test_joint_search_pairs_trials_with_cached_batches(tmp_path):
    sweep, choice = finished_sweep(prefetching_is_useless, tmp_path)
    swept = len(sweep.runner.finished)
    search_joint(sweep, choice, trials=6)
    searched = [
        window.trial.measured for window in sweep.runner.finished[swept : swept + 12]
    ]
    for first, second in zip(searched[::2], searched[1::2], strict=True):
        assert {first["cached"], second["cached"]} == {True, False}
    assert [measured["round"] for measured in searched] == [
        len(sweep.rounds) + number // 2 for number in range(12)
    ]


def test_joint_search_skips_settings_that_exceed_memory(tmp_path):
    host = replace(LIMITS.host, shm_free_bytes=16 * 2**20)
    tight = replace(FEW_WORKERS, host=host)
    sweep, choice = finished_sweep(prefetching_helps, tmp_path, limits=tight)
    search_joint(sweep, choice, trials=15)
    for data in settings_of(sweep):
        limits = replace(tight, prefetch_factor=data["prefetch_factor"])
        assert limits.shortage(data["num_workers"]) is None
    assert len({data["prefetch_factor"] for data in settings_of(sweep)}) > 1


def test_joint_search_leaves_out_dying_workers(tmp_path):
    def die_by_prefetching(trial):
        return DEAD_WORKER if loader_settings(trial)["prefetch_factor"] == 8 else None

    machine = FeedMachine(prefetching_helps, die_by_prefetching)
    sweep = sweep_on(machine, tmp_path, limits=FEW_WORKERS)
    joint = search_joint(sweep, sweep.run(), trials=10)
    assert joint.prefetch_factor != 8
    assert not joint.adopted


@pytest.fixture
def finished(tmp_path):
    """Return a finished sweep of a step that two workers keep up with."""
    sweep = sweep_on(FeedMachine(knee_at(2)), tmp_path)
    sweep.run()
    return sweep


def study_after(sweep, *, pinning=False):
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
    cached = training_trial(finished.training, CONFIG, 101, [], cached=True)
    windows = [NamedWindow(name="cached batches", trial=cached)]
    for name, num_workers, prefetch_factor in (
        ("a prefetch that is not searched", 1, 3),
        ("more than are allowed", 50, 2),
        ("in the space", 1, 4),
    ):
        settings = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        config = with_data(CONFIG, settings)
        trial = training_trial(finished.training, config, 101, [])
        windows.append(NamedWindow(name=name, trial=trial))
    finished.measure_windows(101, windows)
    added = study_after(finished).trials[known:]
    assert [trial.params for trial in added] == [
        {"num_workers": 1, "prefetch_factor": 4}
    ]


def test_study_ignores_rounds_without_cached_batches(finished):
    known = len(study_after(finished).trials)
    config = with_data(CONFIG, {"num_workers": 1})
    trial = training_trial(finished.training, config, 100, [])
    window = NamedWindow(name="without cached batches", trial=trial)
    finished.measure_windows(100, [window])
    assert len(study_after(finished).trials) == known


def test_study_ignores_crashed_windows(finished):
    known = len(study_after(finished).trials)
    finished.runner.machine._simulate = lambda trial: Crashed(detail="boom")
    trial = Trial(job="training", measured={"cached": False}, timeout_s=1)
    finished.runner.run(trial, "crashes")
    assert len(study_after(finished).trials) == known
