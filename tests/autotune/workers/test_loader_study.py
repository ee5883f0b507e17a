"""The Optuna study of a sweep, and of the joint search after it."""

import statistics
from dataclasses import replace

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.errors import Undecided
from autotune.profiles.store import with_data
from autotune.trials.outcomes import Crashed, Measured
from autotune.workers.joint_search import search_joint
from autotune.workers.loader_study import RATIOS
from testbed.examples.feeds import (
    CONFIG,
    DEAD_WORKER,
    LIMITS,
    FeedMachine,
    figures_of,
    knee_at,
    loader_settings,
    sweep_on,
)

NAME = "workers"
GPU = {
    "samples": 10,
    "utilisation_share": 0.93,
    "power_w": 400.0,
    "gpm_sm_share": 0.8,
    "gpm_tensor_share": 0.3,
    "gpm_dram_share": 0.5,
}


def prefetching_helps(data) -> float:
    """Return a rate that is half as high again with the largest prefetch factor."""
    rate = 0.2 * data.num_workers + 0.01
    return 1.5 * rate if data.prefetch_factor == 8 else rate


def stored(file):
    """Return the study of a sweep, read from its file."""
    storage = JournalStorage(JournalFileBackend(str(file)))
    return optuna.load_study(study_name=NAME, storage=storage)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return a finished sweep whose windows have GPU figures, and its study."""
    directory = tmp_path_factory.mktemp("sweep")
    file = directory / "tuning.log"
    machine = FeedMachine(knee_at(2), gpus=[GPU])
    sweep = sweep_on(machine, directory, study_file=file)
    sweep.run()
    return sweep, stored(file)


def test_each_count_is_a_trial(swept):
    sweep, study = swept
    counts = [trial.params["num_workers"] for trial in study.trials]
    assert sorted(counts) == sweep.counts
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert study.metric_names == ["tokens/s incl. padding"]


def test_value_is_the_median_rate_of_the_windows(swept):
    sweep, study = swept
    for trial in study.trials:
        windows = sweep.windows_with(trial.params["num_workers"])
        rates = [window.padded_units_per_s for window in windows]
        assert trial.value == statistics.median(rates)
        assert sorted(trial.intermediate_values.values()) == sorted(rates)


def test_attributes_tell_waits_verdicts_and_activity(swept):
    _, study = swept
    by_count = {trial.params["num_workers"]: trial.user_attrs for trial in study.trials}
    assert by_count[2]["outcome"] == "sufficient"
    assert by_count[1]["outcome"] == "too few"
    assert by_count[1]["data_wait_share"] == pytest.approx(0.5)
    assert by_count[1]["ratio_to_cached"] == pytest.approx(0.5, rel=0.01)
    assert by_count[1][RATIOS] == pytest.approx([0.5] * 4, rel=0.01)
    assert by_count[2][RATIOS] == []
    shown = {name: by_count[2][name] for name in GPU if name != "samples"}
    assert shown == {name: GPU[name] for name in GPU if name != "samples"}


def test_study_knows_upper_bound_and_choice(swept):
    _, study = swept
    assert study.user_attrs["upper_bound_units_per_s"] == pytest.approx(1000, rel=0.01)
    assert study.user_attrs["chosen_num_workers"] == 2


def test_resumed_sweep_writes_the_same_study(tmp_path):
    file = tmp_path / "tuning.log"
    sweep_on(FeedMachine(knee_at(2)), tmp_path, study_file=file).run()
    first = [(trial.params, trial.value) for trial in stored(file).trials]
    machine = FeedMachine(knee_at(2))
    sweep_on(machine, tmp_path, study_file=file).run()
    assert machine.trials == []
    assert [(trial.params, trial.value) for trial in stored(file).trials] == first


def test_interrupted_sweep_keeps_its_complete_rounds(tmp_path):
    def interrupt(trial):
        if loader_settings(trial)["num_workers"] == 2:
            raise KeyboardInterrupt

    file = tmp_path / "tuning.log"
    sweep = sweep_on(FeedMachine(knee_at(4), interrupt), tmp_path, study_file=file)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    states = {
        trial.params["num_workers"]: (trial.state, trial.user_attrs["outcome"])
        for trial in stored(file).trials
    }
    assert states == {
        0: (TrialState.COMPLETE, "interrupted"),
        1: (TrialState.COMPLETE, "interrupted"),
        2: (TrialState.FAIL, "interrupted"),
    }


def test_failed_window_fails_its_trial_with_the_reason(tmp_path):
    def crash(trial):
        return Crashed(detail="boom") if not trial.measured["cached"] else None

    file = tmp_path / "tuning.log"
    sweep = sweep_on(FeedMachine(knee_at(2), crash), tmp_path, study_file=file)
    with pytest.raises(Undecided):
        sweep.run()
    (trial,) = stored(file).trials
    assert trial.state == TrialState.FAIL
    assert "crashed" in trial.user_attrs["outcome"]


def test_dead_workers_fail_their_trial(tmp_path):
    def die(trial):
        return DEAD_WORKER if loader_settings(trial)["num_workers"] == 4 else None

    file = tmp_path / "tuning.log"
    sweep_on(FeedMachine(knee_at(8), die), tmp_path, study_file=file).run()
    (failed,) = stored(file).get_trials(states=(TrialState.FAIL,))
    assert failed.params["num_workers"] == 4
    assert "crashed" in failed.user_attrs["outcome"]


def joint_study(machine, directory, limits=LIMITS):
    """Return the study of a sweep of at most three workers and of its joint search."""
    sweep = sweep_on(
        machine,
        directory,
        limits=replace(limits, requested_workers=3),
        study_file=directory / "tuning.log",
    )
    joint = search_joint(sweep, sweep.run())
    return joint, stored(directory / "tuning.log")


def test_joint_configurations_are_trials_of_the_same_study(tmp_path):
    joint, study = joint_study(FeedMachine(prefetching_helps), tmp_path)
    phases = [trial.user_attrs["phase"] for trial in study.trials]
    assert phases.count("sweep") == 4
    assert phases.count("joint search") == joint.trials
    assert phases[-1] == "comparison"
    winner = study.trials[-1]
    assert winner.params == {"num_workers": 3, "prefetch_factor": 8}
    assert winner.user_attrs["outcome"] == "adopted"
    assert study.best_params == winner.params
    ratios = winner.user_attrs[RATIOS]
    assert statistics.fmean(ratios) == pytest.approx(joint.ratio_to_workers_alone, 0.01)


def test_joint_search_proposes_settings_near_the_best(tmp_path):
    _, study = joint_study(FeedMachine(prefetching_helps), tmp_path)
    proposed = [
        (trial.params["num_workers"], trial.params["prefetch_factor"])
        for trial in study.trials
        if trial.user_attrs["phase"] == "joint search"
    ]
    assert (3, 2) not in proposed, "workers alone are in every round"
    assert (3, 8) in proposed[:6]


def test_settings_that_do_not_fit_are_failed_trials(tmp_path):
    # Shared memory holds 16 batches, of which 90 % may be used.
    host = replace(LIMITS.host, shm_free_bytes=16 * LIMITS.batch_bytes)
    limits = replace(LIMITS, host=host)
    _, study = joint_study(FeedMachine(prefetching_helps), tmp_path, limits)
    failed = study.get_trials(states=(TrialState.FAIL,))
    assert failed
    for trial in failed:
        assert trial.user_attrs["outcome"] == "predicted not to fit into memory"
        assert trial.params["num_workers"] * trial.params["prefetch_factor"] > 8


def test_present_prefetch_factor_is_among_the_values(tmp_path):
    config = with_data(CONFIG, {"prefetch_factor": 3})
    sweep = sweep_on(FeedMachine(knee_at(1)), tmp_path, config=config)
    sweep.run()
    trial = sweep.study.study.study.trials[0]
    assert trial.params["prefetch_factor"] == 3
    assert trial.distributions["prefetch_factor"].choices == (1, 2, 3, 4, 8)


def test_metric_of_a_step_that_counts_no_work_is_batches(tmp_path):
    def batches(trial):
        figures = figures_of(trial, knee_at(1))
        return Measured(figures=figures | {"unit": "batches", "counts_padding": False})

    sweep = sweep_on(FeedMachine(knee_at(1), batches), tmp_path)
    sweep.run()
    assert sweep.study.study.study.metric_names == ["batches/s"]
