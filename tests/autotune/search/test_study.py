import optuna
import pytest

from autotune.core.outcome import Crashed
from autotune.core.trial import Trial
from autotune.search.study import loader_space, study_of
from autotune.search.workers import Asked, with_loader
from tests.autotune.search.feeds import CONFIG, FeedMachine, knee_at, sweep_on


@pytest.fixture
def sweep(tmp_path):
    made = sweep_on(FeedMachine(knee_at(2)), tmp_path)
    made.run()
    return made


def test_the_study_holds_every_window_that_is_not_from_memory(sweep):
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=False)
    expected = [
        (one.trial.measured["round"], one.trial.measured["config"]["data"]["loader_workers"])
        for one in sweep.runner.finished
        if not one.trial.measured["cached"]
    ]
    assert [(trial.user_attrs["round"], trial.params["loader_workers"]) for trial in study.trials] == expected
    assert {trial.params["prefetch_batches"] for trial in study.trials} == {2}
    assert {"pin_memory"} & {name for trial in study.trials for name in trial.params} == set()
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE


def test_a_trials_value_is_its_ratio_to_the_ceiling_of_its_round(sweep):
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=False)
    for trial in study.trials:
        expected = knee_at(2)(CONFIG.data.model_copy(update={"loader_workers": trial.params["loader_workers"]}))
        assert trial.value == pytest.approx(expected, rel=0.005)
        assert trial.user_attrs["data_wait_share"] == pytest.approx(1 - expected)
    assert study.best_params["loader_workers"] == 2


def test_with_a_gpu_pinning_is_part_of_it(sweep):
    assert set(loader_space(4, pinning=True)) - set(loader_space(4, pinning=False)) == {"pin_memory"}
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=True)
    assert {trial.params["pin_memory"] for trial in study.trials} == {True}


def test_what_has_no_ceiling_or_lies_outside_or_failed_is_left_out(sweep):
    one = with_loader(CONFIG, workers=1)
    sweep.read_round(100, [Asked(name="without its ceiling", config=one)])
    sweep.read_round(
        101,
        [
            Asked(name="ceiling", config=CONFIG, cached=True),
            Asked(name="a prefetch that is not searched", config=with_loader(CONFIG, workers=1, prefetch=3)),
            Asked(name="more than are allowed", config=with_loader(CONFIG, workers=50)),
            Asked(name="inside", config=with_loader(CONFIG, workers=1, prefetch=4)),
        ],
    )
    sweep.runner.machine._simulate = lambda trial: Crashed(detail="boom")
    sweep.runner.run(Trial(job="feed", measured={"cached": False}, timeout_s=1), "crashes")
    study = study_of(sweep.runner.finished, sweep.max_workers, pinning=False)
    late = [trial for trial in study.trials if trial.user_attrs["round"] >= 100]
    assert [trial.params for trial in late] == [{"loader_workers": 1, "prefetch_batches": 4}]
