from dataclasses import asdict
from typing import get_args

import pytest

from autotune.trials.values import (
    Measured,
    Outcome,
    StepFigures,
    TrainingFigures,
    TrialRecord,
    describe,
    outcome_from_json,
)
from testbed.examples.trials import STEP_FIGURES, TRAINING_FIGURES, record


def test_figures_are_read_without_series_and_from_before_ranks_were_told_apart_are_those_of_one():
    assert [
        StepFigures.of(Measured(figures=STEP_FIGURES | more)).local_ranks
        for more in ({}, {"local_ranks": 2})
    ] == [1, 2]
    gpus = [{"samples": 3, "utilisation_share": 0.5, "series": {"time_s": [1.0, 2.0]}}]
    figures = TrainingFigures.of(Measured(figures=TRAINING_FIGURES | {"gpus": gpus}))
    assert [
        (one.samples, one.utilisation_share, one.power_w) for one in figures.gpus
    ] == [(3, 0.5, None)]
    assert TrainingFigures.of(Measured(figures=TRAINING_FIGURES)).gpus == ()


def test_a_feed_window_of_another_version_is_no_record():
    said = record("training").model_dump(mode="json")
    assert TrialRecord.of(said) is not None
    old = {
        name: figure for name, figure in TRAINING_FIGURES.items() if name != "steps"
    } | {"step_s": [0.1]}
    assert (
        TrialRecord.of(said | {"outcome": {"kind": "measured", "figures": old}}) is None
    )


def test_every_outcome_survives_the_ledger_and_reads_apart():
    failures = [kind(detail="d") for kind in get_args(Outcome) if kind is not Measured]
    every = [Measured(figures={"a": 1}), *failures]
    assert [outcome_from_json(asdict(one)) for one in every] == every
    assert len({describe(one) for one in every}) == len(every) == 6


@pytest.mark.parametrize(
    "value",
    [{}, {"kind": "great"}, {"kind": "measured"}, {"kind": "crashed", "detail": 3}],
)
def test_what_is_no_outcome_is_refused(value):
    with pytest.raises(ValueError, match="not an outcome"):
        outcome_from_json(value)
