import pytest

from autotune.core.advice import Advice
from autotune.core.bottleneck import StepPart
from autotune.decide.advice import advise
from autotune.decide.advice.gains import times, without
from tests.autotune.decide.advice.scenarios import scenarios

CONFIDENCES = {0.95, 0.96, 0.98}
"""Of bounds that tell noise, of a ratio of two that decide, and of bounds that decide."""
READINGS = {"gradient noise scale"}
"""Figures whose bounds are the middle half of what was read."""
MEASURED = StepPart(cause="input", share=0.2, low=0.18, high=0.22)


@pytest.fixture(scope="module")
def every() -> list[Advice]:
    return [advice for scenario in scenarios() for advice in advise(scenario.speaks())]


def test_bounds_of_measured_figures_name_their_confidence(every):
    bounded = [figure for advice in every for figure in advice.evidence if figure.low is not None]
    assert bounded
    for figure in bounded:
        is_interval = figure.known != "assumed" and figure.name not in READINGS
        assert (figure.confidence in CONFIDENCES) == is_interval, figure


def test_gains_name_a_confidence_only_where_nothing_is_assumed(every):
    bounded = [advice.gain for advice in every if advice.gain is not None and advice.gain.low is not None]
    assert all(gain.confidence in CONFIDENCES for gain in bounded if gain.known == "measured")
    assert any(gain.confidence is None for gain in bounded)


def test_without_bounds_there_is_no_confidence(every):
    figures = [figure for advice in every for figure in advice.evidence]
    gains = [advice.gain for advice in every if advice.gain is not None]
    assert all(one.confidence is None for one in [*figures, *gains] if one.low is None)


def test_a_part_taken_away_is_as_certain_as_the_part():
    assert without(MEASURED).confidence == 0.95
    assert without(StepPart(cause="input", share=0.2)).confidence is None


def test_what_stays_at_best_and_at_worst_is_assumed():
    assert without(MEASURED, (0.0, 0.5, 1.0)).confidence is None
    assert times(without(MEASURED), (1.0, 1.1, 1.2)).confidence is None
