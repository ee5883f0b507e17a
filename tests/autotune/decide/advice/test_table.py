"""The order of advice, and what is said where nothing is to be done. What rules say is in tests of scenarios."""

from dataclasses import replace

import pytest

from autotune.core.advice import SEVERITIES, Gain
from autotune.decide.advice import NOTHING, RULES, TOO_LITTLE, Situation, advise
from tests.autotune.decide.advice.scenarios import ran, scenarios, tuned
from tests.autotune.decide.worlds import World, settings

GPU = World()


class TestOrder:
    def test_what_fails_comes_first_then_what_gains_most(self):
        now = tuned(GPU, settings(GPU, precision="fp32"), micro_batch_rows=10**6)
        found = advise(now)
        assert found[0].severity == "must"
        speedups = [1.0 if one.gain is None else one.gain.speedup for one in found[1:]]
        assert speedups == sorted(speedups, reverse=True)

    def test_money_is_no_time(self):
        hours = Gain(of="GPU-hours", ratio=0.4, known="predicted")
        tokens = Gain(of="tokens to the same loss", ratio=0.5, known="predicted")
        assert (hours.speedup, tokens.speedup) == (1.0, 2.0)


class TestNothing:
    def test_good_settings_are_left_alone(self):
        found = advise(ran(GPU, settings(GPU)))
        assert NOTHING in [one.rule for one in found]
        assert all(one.severity == "note" for one in found)

    def test_it_is_not_said_beside_something_to_do(self):
        assert NOTHING not in [one.rule for one in advise(ran(GPU, settings(GPU, layout="padded")))]

    def test_an_empty_situation_has_nothing_to_do(self):
        assert [one.rule for one in advise(Situation(train=None))] == [TOO_LITTLE]


def test_names_are_unique_and_severities_known():
    assert len({rule.name for rule in RULES}) == len(RULES)
    for scenario in scenarios():
        for one in advise(scenario.speaks()):
            assert one.severity in SEVERITIES
            assert one.rule in {rule.name for rule in RULES} | {NOTHING, TOO_LITTLE}


@pytest.mark.parametrize("rule", ["beyond-memory", "foreach-optimizer"])
@pytest.mark.parametrize(("driver", "known"), [("580.1", "measured"), ("0.0 (nullgpu)", "allocator")])
def test_peaks_of_a_pretended_gpu_are_evidence_of_the_allocator(rule, driver, known):
    now = tuned(GPU, settings(GPU), micro_batch_rows=10**6)
    if rule == "foreach-optimizer":
        now = next(one.speaks() for one in scenarios() if one.rule == rule)
    here = now.profile.fingerprint.model_copy(update={"driver": driver})
    now = replace(now, profile=now.profile.model_copy(update={"fingerprint": here}))
    [found] = [one for one in advise(now) if one.rule == rule]
    assert [one.known for one in found.evidence if "peak" in one.name] == [known]


def test_a_run_without_a_profile_is_enough_for_advice():
    now = replace(ran(GPU, settings(GPU, layout="padded")), data=None)
    assert "padding" in [one.rule for one in advise(now)]
