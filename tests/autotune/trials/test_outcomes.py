"""Outcomes of trials survive JSON and are told apart."""

from dataclasses import asdict
from typing import get_args

import pytest

from autotune.trials.outcomes import Measured, Outcome, describe, outcome_from_json

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
    [
        pytest.param({}, id="no kind"),
        pytest.param({"kind": "great"}, id="unknown kind"),
        pytest.param({"kind": "measured"}, id="no figures"),
        pytest.param({"kind": "crashed", "detail": 3}, id="detail is no text"),
    ],
)
def test_rejects_invalid_outcome(value):
    with pytest.raises(ValueError, match="not an outcome"):
        outcome_from_json(value)
