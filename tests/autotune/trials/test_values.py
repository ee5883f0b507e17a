"""Figures, outcomes and records of trials as JSON."""

from dataclasses import asdict
from typing import get_args

import pytest

from autotune.trials.job_figures import StepFigures, TrainingFigures
from autotune.trials.outcomes import Measured, Outcome, describe, outcome_from_json
from autotune.trials.values import Trial, TrialRecord
from testbed.examples.trials import STEP_FIGURES, TRAINING_FIGURES, record


@pytest.mark.parametrize(
    ("changes", "local_ranks"),
    [
        pytest.param({}, 1, id="from before ranks were counted"),
        pytest.param({"local_ranks": 2}, 2, id="counted"),
    ],
)
def test_step_figures_have_one_rank_by_default(changes, local_ranks):
    figures = StepFigures.of(Measured(figures=STEP_FIGURES | changes))
    assert figures.local_ranks == local_ranks


def test_training_figures_leave_out_gpu_series():
    gpu = {"samples": 3, "utilisation_share": 0.5, "series": {"time_s": [1.0, 2.0]}}
    outcome = Measured(figures=TRAINING_FIGURES | {"gpus": [gpu]})
    (gpu_figures,) = TrainingFigures.of(outcome).gpus
    assert gpu_figures.samples == 3
    assert gpu_figures.utilisation_share == 0.5
    assert gpu_figures.power_w is None


def test_training_figures_may_have_no_gpus():
    assert TrainingFigures.of(Measured(figures=TRAINING_FIGURES)).gpus == ()


def test_window_of_another_version_is_no_record():
    entry = record("training").model_dump(mode="json")
    assert TrialRecord.of(entry) is not None
    old_figures = TRAINING_FIGURES | {"step_s": [0.1]}
    del old_figures["steps"]
    old_outcome = {"kind": "measured", "figures": old_figures}
    assert TrialRecord.of(entry | {"outcome": old_outcome}) is None


@pytest.mark.parametrize("local_ranks", ["2", None, 0, -3, 1.5])
def test_invalid_rank_count_is_one(local_ranks):
    measured = {"local_ranks": local_ranks}
    assert Trial(job="step", measured=measured, timeout_s=1.0).ranks == 1


FAILURES = [kind(detail="d") for kind in get_args(Outcome) if kind is not Measured]
OUTCOMES = [Measured(figures={"a": 1}), *FAILURES]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.kind)
def test_outcome_survives_json(outcome):
    assert outcome_from_json(asdict(outcome)) == outcome


def test_outcomes_have_distinct_descriptions():
    assert len(OUTCOMES) == 6
    assert len({describe(outcome) for outcome in OUTCOMES}) == 6


@pytest.mark.parametrize(
    "value",
    [{}, {"kind": "great"}, {"kind": "measured"}, {"kind": "crashed", "detail": 3}],
)
def test_rejects_invalid_outcome(value):
    with pytest.raises(ValueError, match="not an outcome"):
        outcome_from_json(value)
