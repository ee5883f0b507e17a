from dataclasses import asdict

import pytest

from autotune.core.outcome import (
    Contaminated,
    Crashed,
    HostOutOfMemory,
    Measured,
    OutOfMemory,
    TimedOut,
    describe,
    outcome_from_json,
)

ALL = [
    Measured(figures={"a": 1}),
    *(kind(detail="d") for kind in (OutOfMemory, HostOutOfMemory, TimedOut, Crashed, Contaminated)),
]


@pytest.mark.parametrize("outcome", ALL, ids=lambda outcome: outcome.kind)
def test_every_outcome_survives_the_ledger(outcome):
    assert outcome_from_json(asdict(outcome)) == outcome


def test_outcomes_read_apart():
    assert len({describe(outcome) for outcome in ALL}) == len(ALL)


@pytest.mark.parametrize("value", [{}, {"kind": "great"}, {"kind": "measured"}, {"kind": "crashed", "detail": 3}])
def test_what_is_no_outcome_is_refused(value):
    with pytest.raises(ValueError, match="not an outcome"):
        outcome_from_json(value)
