from dataclasses import replace

import optuna
import pytest

from autotune.core.outcome import Crashed
from autotune.core.trial import Trial
from autotune.search.joint import gap_remains, search_joint, study_of
from autotune.search.workers import Asked, evidence, with_loader
from tests.autotune.search.feeds import (
    CONFIG,
    DEAD,
    HOST,
    LIMITS,
    ON_CPU,
    FeedMachine,
    knee_at,
    loader_of,
    sweep_on,
)

FEW_WORKERS = replace(LIMITS, asked=3)


def prefetching_helps(data) -> float:
    """No count gets beyond 60 % of the ceiling, unless much is held ready."""
    return 0.2 * data.loader_workers * (1.5 if data.prefetch_batches == 8 else 1.0) + 0.01


def finished(rate, directory):
    sweep = sweep_on(FeedMachine(rate), directory, limits=FEW_WORKERS)
    return sweep, sweep.run()


def settings_of(sweep):
    return [loader_of(one.trial) for one in sweep.runner.finished]


def test_what_is_proven_to_be_faster_is_adopted_and_the_same_ledger_gives_the_same(tmp_path):
    sweep, choice = finished(prefetching_helps, tmp_path)
    found = search_joint(sweep, choice, trials=15)
    assert (found.adopted, found.loader_workers, found.prefetch_batches) == (True, 3, 8)
    assert found.ratio_to_workers_alone == pytest.approx(1.5, rel=0.03)
    assert 1 < found.ratio_low <= found.ratio_to_workers_alone
    assert {data["pin_memory"] for data in settings_of(sweep)} == {True}  # as it was: there is no GPU
    again, same = finished(prefetching_helps, tmp_path)
    assert search_joint(again, same, trials=15) == found
    assert again.runner.machine.trials == []


def test_what_is_not_faster_is_not_adopted_and_each_trial_stands_beside_its_ceiling(tmp_path):
    sweep, choice = finished(lambda data: 0.2 * data.loader_workers + 0.01, tmp_path)
    assert gap_remains(choice)
    assert not gap_remains(finished(knee_at(2), tmp_path / "none")[1])
    before, kept = len(sweep.runner.finished), evidence(sweep, choice, ON_CPU)
    assert search_joint(sweep, choice, trials=0) is None
    assert not search_joint(sweep, choice, trials=6).adopted
    searched = [one.trial.measured for one in sweep.runner.finished[before : before + 12]]
    pairs = zip(searched[::2], searched[1::2], strict=True)
    assert all({one["cached"] for one in pair} == {True, False} for pair in pairs)
    assert [one["round"] for one in searched] == [len(sweep.rounds) + number // 2 for number in range(12)]
    after = evidence(sweep, choice, ON_CPU)
    assert (after.chosen, after.rows, after.choice) == (kept.chosen, kept.rows, kept.choice)


def test_settings_that_memory_does_not_hold_are_not_tried(tmp_path):
    tight = replace(FEW_WORKERS, host=replace(HOST, shm_free_bytes=16 * 2**20))
    sweep = sweep_on(FeedMachine(prefetching_helps), tmp_path, limits=tight)
    search_joint(sweep, sweep.run(), trials=15)
    for data in settings_of(sweep):
        limits = replace(tight, prefetch_batches=data["prefetch_batches"])
        assert limits.refusal(data["loader_workers"]) is None
    assert len({data["prefetch_batches"] for data in settings_of(sweep)}) > 1


def test_settings_whose_workers_die_are_left_out(tmp_path):
    machine = FeedMachine(prefetching_helps, lambda trial: DEAD if loader_of(trial)["prefetch_batches"] == 8 else None)
    sweep = sweep_on(machine, tmp_path, limits=FEW_WORKERS)
    found = search_joint(sweep, sweep.run(), trials=10)
    assert found.prefetch_batches != 8
    assert not found.adopted


@pytest.fixture
def sweep(tmp_path):
    made = sweep_on(FeedMachine(knee_at(2)), tmp_path)
    made.run()
    return made


def test_the_study_holds_the_ratio_of_every_window_to_the_ceiling_of_its_round(sweep):
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=False)
    expected = [count for count in sweep.runner.machine.counts if count is not None]
    assert [trial.params["loader_workers"] for trial in study.trials] == expected
    assert {(trial.params["prefetch_batches"], len(trial.params)) for trial in study.trials} == {(2, 2)}
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    for trial in study.trials:
        expected = knee_at(2)(CONFIG.data.model_copy(update={"loader_workers": trial.params["loader_workers"]}))
        assert trial.value == pytest.approx(expected, rel=0.005)
    with_pinning = study_of(sweep.runner.finished, sweep.max_workers, pinning=True)
    assert {trial.params["pin_memory"] for trial in with_pinning.trials} == {True}  # as on a GPU


def test_what_has_no_ceiling_or_lies_outside_or_failed_is_left_out(sweep):
    before = len(study_of(sweep.runner.finished, sweep.max_workers, pinning=False).trials)
    others = {"a prefetch that is not searched": (1, 3), "more than are allowed": (50, 2), "inside": (1, 4)}
    windows = [
        Asked(name=name, config=with_loader(CONFIG, loader_workers=count, prefetch_batches=ahead))
        for name, (count, ahead) in others.items()
    ]
    sweep.read_round(100, [Asked(name="without its ceiling", config=with_loader(CONFIG, loader_workers=1))])
    sweep.read_round(101, [Asked(name="ceiling", config=CONFIG, cached=True), *windows])
    sweep.runner.machine._simulate = lambda trial: Crashed(detail="boom")
    sweep.runner.run(Trial(job="feed", measured={"cached": False}, timeout_s=1), "crashes")
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=False)
    assert [trial.params for trial in study.trials[before:]] == [{"loader_workers": 1, "prefetch_batches": 4}]
