"""Every rule has a scenario in which following it delivers what it promised, and one in which it is silent."""

import pytest

from autotune.decide.advice import NOTHING, RULES, TOO_LITTLE
from tests.autotune.decide.advice.scenarios import scenarios

EVERY = scenarios()
TOLERANCE = 0.1
"""Of a promise without an interval."""
PAPER = {"R1", "R2", "R3", "R4", "R5"}
CAUSES = {"input", "padding", "network", "straggler", "host", "memory", "update", "computation"}


def test_every_rule_has_a_scenario_and_no_scenario_is_of_no_rule():
    assert {one.rule for one in EVERY} == {rule.name for rule in RULES} | {NOTHING, TOO_LITTLE}


def test_rules_cover_the_paper_and_every_bottleneck():
    assert {covered for rule in RULES for covered in rule.covers} == PAPER | CAUSES


@pytest.mark.parametrize("scenario", EVERY, ids=lambda one: f"{one.rule}: {one.what}")
class TestScenario:
    def test_the_rule_speaks_with_evidence_cost_and_what_would_change_it(self, scenario):
        advice = scenario.spoken()
        assert advice is not None
        assert advice.claim
        assert advice.cost
        assert advice.would_change
        said_in_words = advice.rule in ("half-precision", "foreach-optimizer")  # of another trainer
        assert advice.severity in ("must", "note") or advice.changes or advice.command or said_in_words

    def test_the_rule_is_silent_where_there_is_nothing_to_say(self, scenario):
        assert scenario.is_silent()

    def test_following_it_delivers_what_was_promised(self, scenario):
        advice = scenario.spoken()
        assert advice is not None
        if scenario.delivered is None:
            # Nothing is promised in words; raw data and full memories are followed for real by benchmarks.advice.
            assert advice.gain is None or advice.rule == "raw-data"
            return
        assert advice.gain is not None
        delivered = scenario.delivered(advice)
        low = advice.gain.ratio * (1 - TOLERANCE) if advice.gain.low is None else advice.gain.low
        high = advice.gain.ratio * (1 + TOLERANCE) if advice.gain.high is None else advice.gain.high
        assert low * 0.98 <= delivered <= high * 1.02
        # Wide intervals promise nothing: what is likeliest must be near as well, on the right side of nothing.
        assert (delivered - 1) * (advice.gain.ratio - 1) > 0
        assert 0.5 < (delivered - 1) / (advice.gain.ratio - 1) < 2
