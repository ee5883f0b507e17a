from dataclasses import replace

import optuna
import pytest
from optuna.trial import TrialState

from autotune.core.knobs import KNOBS, Knobs
from autotune.search.sampling import PosteriorSampler, VisiblePruner, distributions
from tests.autotune.search.explorations import FEW, UNEXPLORED

OTHER = replace(UNEXPLORED, precision="bf16", layout="padded", micro_batch_rows=16)


def study_of(propose, hopeless=lambda value: False):
    return optuna.create_study(
        direction="maximize",
        sampler=PosteriorSampler(distributions(FEW), propose, seed=0),
        pruner=VisiblePruner(hopeless),
    )


def asked(study):
    return study.ask(fixed_distributions=distributions(FEW))


def test_the_space_has_every_value_of_every_knob_once():
    space = distributions(FEW)
    assert set(space) == set(KNOBS)
    for name, one in space.items():
        assert len(one.choices) == len(set(one.choices))
        assert set(one.choices) == {getattr(cell, name) for cell in FEW}


def test_a_trial_is_the_proposed_cell():
    trial = asked(study_of(lambda pending: OTHER))
    assert Knobs(**trial.params) == OTHER


def test_who_proposes_is_told_what_is_being_tried_and_not_what_is_over():
    told = []

    def propose(pending):
        told.append(list(pending))
        return FEW[len(told)]

    study = study_of(propose)
    first, _ = asked(study), asked(study)
    study.tell(first, 1.0)
    asked(study)
    assert told == [[], [FEW[1]], [FEW[2]]]


def test_where_nothing_is_left_some_settings_are_asked_for_that_are_always_the_same():
    params = [asked(study_of(lambda pending: None)).params for _ in range(2)]
    assert params[0] == params[1]
    assert set(params[0]) == set(KNOBS)


def test_values_that_were_told_stand_in_the_study_by_knob():
    study = study_of(lambda pending: OTHER)
    study.tell(asked(study), 0.3)
    study.tell(asked(study), state=TrialState.PRUNED)
    assert study.best_params == OTHER.settings()
    assert [one.state for one in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]


@pytest.mark.parametrize(("value", "pruned"), [(-0.5, True), (0.1, False)])
def test_a_first_look_is_pruned_where_it_is_hopeless(value, pruned):
    trial = asked(study_of(lambda pending: OTHER, hopeless=lambda one: one < 0))
    assert not trial.should_prune()  # before there was a look
    trial.report(value, step=0)
    assert trial.should_prune() is pruned
