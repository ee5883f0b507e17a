"""The sampler in Optuna's own loop."""

import math
import random

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from autotune.sampler.pairwise_effects import MAX_VALUES, PairwiseEffectsSampler

SPACE = {
    "precision": CategoricalDistribution(("fp32", "bf16")),
    "compile": CategoricalDistribution((False, True)),
    "layout": CategoricalDistribution(("packed", "padded", "bucketed")),
    "size": IntDistribution(1, 32, log=True),
}


def rate(params):
    size = params["size"]
    return (
        1000
        * size
        / (size + 4)
        * {"fp32": 1.0, "bf16": 1.5}[params["precision"]]
        * (1.3 if params["compile"] and params["precision"] == "bf16" else 1.0)
        * {"packed": 1.0, "padded": 0.5, "bucketed": 0.8}[params["layout"]]
    )


BEST = rate({"precision": "bf16", "compile": True, "layout": "packed", "size": 32})


def study_with(sampler, direction="maximize"):
    return optuna.create_study(direction=direction, sampler=sampler)


def suggested(trial):
    return {
        "precision": trial.suggest_categorical("precision", ("fp32", "bf16")),
        "compile": trial.suggest_categorical("compile", (False, True)),
        "layout": trial.suggest_categorical("layout", ("packed", "padded", "bucketed")),
        "size": trial.suggest_int("size", 1, 32, log=True),
    }


@pytest.mark.parametrize("space", [SPACE, None], ids=["given", "inferred"])
def test_finds_nearly_the_best_in_few_trials(space):
    study = study_with(PairwiseEffectsSampler(space=space, seed=0))
    rng = random.Random(0)
    study.optimize(
        lambda trial: rate(suggested(trial)) * math.exp(rng.gauss(0, 0.01)),
        n_trials=25,
    )
    assert rate(study.best_params) >= 0.95 * BEST


def test_minimizes():
    study = study_with(PairwiseEffectsSampler(seed=0), direction="minimize")
    study.optimize(lambda trial: 1e6 / rate(suggested(trial)), n_trials=25)
    assert rate(study.best_params) >= 0.95 * BEST


@pytest.mark.parametrize("offset", [-900.0, -5000.0], ids=["mixed", "negative"])
def test_values_need_not_be_positive(offset):
    study = study_with(PairwiseEffectsSampler(seed=0))
    study.optimize(lambda trial: rate(suggested(trial)) + offset, n_trials=25)
    assert rate(study.best_params) >= 0.95 * BEST


def test_equal_values_are_no_error():
    study = study_with(PairwiseEffectsSampler(seed=0))
    study.optimize(lambda trial: suggested(trial) and 0.0, n_trials=5)
    assert len({tuple(trial.params.items()) for trial in study.trials}) > 1


def test_same_seed_gives_same_trials():
    def params_of(seed):
        study = study_with(PairwiseEffectsSampler(seed=seed))
        study.optimize(lambda trial: rate(suggested(trial)), n_trials=8)
        return [trial.params for trial in study.trials]

    assert params_of(3) == params_of(3)
    assert params_of(3) != params_of(4)


def test_impossible_parameters_are_not_tried():
    def is_possible(params):
        return params["size"] <= 8 or params["compile"]

    study = study_with(
        PairwiseEffectsSampler(space=SPACE, is_possible=is_possible, seed=0)
    )
    study.optimize(lambda trial: rate(suggested(trial)), n_trials=15)
    tried = [trial.params for trial in study.trials[1:]]
    assert all(map(is_possible, tried))
    assert max(params["size"] for params in tried) > 8


def test_no_possible_parameters_are_an_error():
    sampler = PairwiseEffectsSampler(space=SPACE, is_possible=lambda params: False)
    with pytest.raises(ValueError, match="no candidate is possible"):
        study_with(sampler).ask(SPACE)


def test_slow_parameters_are_tried_later():
    def compiled_trials(seconds):
        sampler = PairwiseEffectsSampler(
            space=SPACE,
            seconds_of=lambda params: seconds if params["compile"] else 1.0,
            seed=0,
        )
        study = study_with(sampler)
        study.optimize(lambda trial: rate(suggested(trial)), n_trials=10)
        return sum(trial.params["compile"] for trial in study.trials)

    assert compiled_trials(1e4) < compiled_trials(1.0)
    assert compiled_trials(math.inf) <= 1


def test_prediction_guides_the_first_trial():
    sampler = PairwiseEffectsSampler(
        space=SPACE,
        predicted_ratio_of=lambda params: rate(params) / 500,
        reference={
            "precision": "fp32",
            "compile": False,
            "layout": "packed",
            "size": 4,
        },
    )
    params = study_with(sampler).ask(SPACE).params
    assert rate(params) >= 0.95 * BEST


def test_predictions_may_become_known_on_the_way():
    known = {"packed"}

    def is_possible(params):
        known.add(params["layout"])
        return True

    def predicted_ratio(params):
        if params["layout"] not in known:
            return None
        return 1.0 if params["layout"] == "packed" else 0.3

    sampler = PairwiseEffectsSampler(
        space=SPACE,
        is_possible=is_possible,
        predicted_ratio_of=predicted_ratio,
        reference={
            "precision": "fp32",
            "compile": False,
            "layout": "packed",
            "size": 4,
        },
    )
    assert study_with(sampler).ask(SPACE).params["layout"] == "packed"


def add_trial(study, params, value=None, state=TrialState.COMPLETE, reported=()):
    study.add_trial(
        optuna.trial.create_trial(
            params=params,
            distributions=SPACE,
            value=value,
            state=state,
            intermediate_values=dict(enumerate(reported)),
        )
    )


def params_of(**changes):
    params = {"precision": "fp32", "compile": False, "layout": "packed", "size": 4}
    return params | changes


def test_failed_and_running_parameters_are_left_out():
    sampler = PairwiseEffectsSampler(
        space=SPACE,
        candidates=[params_of(size=size) for size in (4, 8, 16, 32)],
    )
    study = study_with(sampler)
    add_trial(study, params_of(size=4), 500.0)
    add_trial(study, params_of(size=8), state=TrialState.FAIL)
    proposals = [study.ask(SPACE).params["size"] for _ in range(2)]
    assert sorted(proposals) == [16, 32]


def test_pruned_trials_inform():
    sampler = PairwiseEffectsSampler(
        space=SPACE,
        candidates=[
            params_of(layout=layout, precision="bf16")
            for layout in ("packed", "padded")
        ],
    )
    study = study_with(sampler)
    for size in (4, 8, 16):
        add_trial(study, params_of(size=size), rate(params_of(size=size)))
        padded = params_of(size=size, layout="padded")
        add_trial(
            study,
            padded,
            rate(padded),
            state=TrialState.PRUNED,
            reported=[rate(padded)],
        )
    assert study.ask(SPACE).params["layout"] == "packed"


def test_unmodelled_floats_are_random():
    study = study_with(PairwiseEffectsSampler(seed=0))

    def objective(trial):
        learning_rate = trial.suggest_float("learning_rate", 1e-5, 1e-3, log=True)
        return rate(suggested(trial)) * (1 - abs(learning_rate - 5e-4))

    study.optimize(objective, n_trials=12)
    rates = [trial.params["learning_rate"] for trial in study.trials]
    assert len(set(rates)) == len(rates)


def test_several_objectives_are_rejected():
    study = optuna.create_study(
        directions=["maximize", "minimize"],
        sampler=PairwiseEffectsSampler(space=SPACE),
    )
    with pytest.raises(ValueError, match="multi-objective"):
        study.ask(SPACE)


def test_several_threads_share_a_sampler():
    study = study_with(PairwiseEffectsSampler(space=SPACE, seed=0))
    study.optimize(lambda trial: rate(suggested(trial)), n_trials=16, n_jobs=4)
    assert len(study.get_trials(states=(TrialState.COMPLETE,))) == 16


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(
        st.builds(
            lambda low, width: IntDistribution(low, low + width, log=True),
            st.integers(1, 100),
            st.integers(1, 5000),
        ),
        st.builds(
            lambda low, count, step: IntDistribution(
                low, low + count * step, step=step
            ),
            st.integers(-100, 100),
            st.integers(1, 500),
            st.integers(1, 7),
        ),
        st.builds(
            lambda count: FloatDistribution(0.0, count * 0.25, step=0.25),
            st.integers(1, 300),
        ),
    )
)
def test_numbers_are_thinned_out_within_their_range(distribution):
    seen = set()

    def note(params):
        seen.add(params["number"])
        return False

    space = {"number": distribution}
    sampler = PairwiseEffectsSampler(space=space, is_possible=note)
    assert sampler.propose(study_with(sampler), space) is None
    assert 2 <= len(seen) <= MAX_VALUES
    assert {distribution.low, distribution.high} <= seen
    assert all(
        distribution._contains(distribution.to_internal_repr(number)) for number in seen
    )


def test_large_spaces_are_sampled():
    space = {
        f"choice {number}": CategoricalDistribution(tuple(range(10)))
        for number in range(8)
    }
    study = study_with(PairwiseEffectsSampler(space=space, seed=0))
    trial = study.ask(space)
    study.tell(trial, 1.0)
    assert set(study.ask(space).params) == set(space)
