"""Every rule has a scenario in which following it delivers what it promised, and one in
which it is silent."""

from dataclasses import replace

import pytest

from autotune.advice.decide.apply import apply_changes, safe_changes
from autotune.advice.decide.context import TrainingContext, line, times, without
from autotune.advice.decide.rules import NOTHING, RULES, TOO_LITTLE, advise
from autotune.advice.values import Advice, Gain, SettingChange, StepPart
from autotune.errors import BadInput
from testbed.examples.profiles import but, example_profile
from testbed.scenarios import Scenario, ran, scenarios, tuned
from testbed.simulators.worlds import World, settings

NAMES = [*(rule.name for rule in RULES), NOTHING, TOO_LITTLE]
CONFIDENCES = {0.95, 0.96, 0.98}
"""Of bounds that tell noise, of a ratio of two that decide, and of bounds that
decide."""
READINGS = {"gradient noise scale"}
"""Figures whose bounds are the middle half of what was read."""
MEASURED = StepPart(cause="data loading", share=0.2, low=0.18, high=0.22)
GPU = World()
TOLERANCE = 0.1
"""Of a promise without an interval."""
PAPER = {"R1", "R2", "R3", "R4", "R5"}
CAUSES = {
    "data loading",
    "padding",
    "network",
    "straggler",
    "launch-bound",
    "memory",
    "optimizer step",
    "compute",
}


@pytest.fixture(scope="module")
def every() -> tuple[Scenario, ...]:
    return scenarios()


@pytest.fixture(scope="module")
def all_advice(every) -> list[Advice]:
    return [advice for scenario in every for advice in advise(scenario.speaks)]


def test_rules_have_names_of_their_own_and_cover_the_paper_and_every_bottleneck(every):
    assert len(set(NAMES)) == len(NAMES)
    assert {one.rule for one in every} == set(NAMES)
    assert {covered for rule in RULES for covered in rule.covers} == PAPER | CAUSES


@pytest.mark.parametrize("rule", NAMES)
def test_a_rule_speaks_where_it_should_and_following_it_delivers_what_it_promises(
    every, rule
):
    for scenario in (one for one in every if one.rule == rule):
        assert scenario.is_silent(), scenario.what
        advice = scenario.spoken()
        assert advice is not None, scenario.what
        assert advice.claim
        assert advice.cost
        assert advice.would_change
        assert advice.severity in ("error", "info") or advice.changes or advice.command
        if scenario.delivered is None:
            # Nothing is promised in words; raw data and full memories are followed for
            # real by benchmarks.advice.
            assert advice.gain is None or rule == "tokenise-ahead"
            continue
        assert advice.gain is not None
        delivered = scenario.delivered(advice)
        low = (
            advice.gain.ratio * (1 - TOLERANCE)
            if advice.gain.low is None
            else advice.gain.low
        )
        high = (
            advice.gain.ratio * (1 + TOLERANCE)
            if advice.gain.high is None
            else advice.gain.high
        )
        assert low * 0.98 <= delivered <= high * 1.02
        # Wide intervals promise nothing: what is likeliest must be near as well, on the
        # right side of nothing.
        assert 0.5 < (delivered - 1) / (advice.gain.ratio - 1) < 2


def test_what_fails_comes_first_then_what_gains_most():
    found = advise(tuned(GPU, settings(GPU, precision="fp32"), micro_batch_size=10**6))
    assert found[0].severity == "error"
    speedups = [1.0 if one.gain is None else one.gain.speedup for one in found[1:]]
    assert speedups == sorted(speedups, reverse=True)
    hours = Gain(of="GPU-hours", ratio=0.4, known="predicted")
    tokens = Gain(of="tokens to the same loss", ratio=0.5, known="predicted")
    assert (hours.speedup, tokens.speedup) == (1.0, 2.0)  # money is no time


def test_good_settings_are_left_alone_and_that_is_not_said_beside_something_to_do():
    found = advise(ran(GPU, settings(GPU)))
    assert NOTHING in [one.rule for one in found]
    assert all(one.severity == "info" for one in found)
    found = [
        one.rule
        for one in advise(replace(ran(GPU, settings(GPU, layout="padded")), data=None))
    ]
    assert NOTHING not in found
    assert "padding" in found
    assert [one.rule for one in advise(TrainingContext(train=None))] == [TOO_LITTLE]


@pytest.mark.parametrize(
    ("driver", "known"), [("580.1", "measured"), ("0.0 (nullgpu)", "allocator")]
)
def test_peaks_of_a_pretended_gpu_are_evidence_of_the_allocator(every, driver, known):
    now = next(one.speaks for one in every if one.rule == "beyond-memory")
    now = replace(now, profile=but(now.profile, fingerprint={"driver": driver}))
    [found] = [one for one in advise(now) if one.rule == "beyond-memory"]
    assert [one.known for one in found.evidence if "peak" in one.name] == [known]


def test_lines_neither_begin_below_nothing_nor_fall():
    assert line([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1, 2))
    assert line([1, 2], [1.0, 3.0]) == pytest.approx((0, 2))
    assert line([1, 2], [2.0, 1.0]) == pytest.approx((1.2, 0))
    # A profile may hold any integer.
    assert line([1, 2**70], [1.0, 2.0]) == pytest.approx((1, 2**-70))


def test_bounds_name_a_confidence_only_where_nothing_is_assumed(all_advice):
    figures = [figure for advice in all_advice for figure in advice.evidence]
    gains = [advice.gain for advice in all_advice if advice.gain is not None]
    assert all(one.confidence is None for one in [*figures, *gains] if one.low is None)
    bounded_figures, bounded = (
        [one for one in some if one.low is not None] for some in (figures, gains)
    )
    assert bounded_figures
    for figure in bounded_figures:
        is_interval = figure.known != "assumed" and figure.name not in READINGS
        assert (figure.confidence in CONFIDENCES) == is_interval, figure
    assert all(
        gain.confidence in CONFIDENCES for gain in bounded if gain.known == "measured"
    )
    assert any(gain.confidence is None for gain in bounded)
    assert without(MEASURED).confidence == 0.95
    assumed = without(MEASURED, (0.0, 0.5, 1.0))
    others = (
        without(StepPart(cause="data loading", share=0.2)),
        assumed,
        times(without(MEASURED), (1.0, 1.1, 1.2)),
    )
    assert [one.confidence for one in others] == [None] * 3


def advice(*changes: SettingChange, safe: bool = True) -> Advice:
    return Advice(
        rule="x",
        severity="warning",
        claim="",
        evidence=(),
        gain=None,
        cost="",
        changes=changes,
        would_change="",
        safe=safe,
    )


def change(key: str, old: object, new: object) -> SettingChange:
    return SettingChange(key=key, old=old, new=new)


def test_only_safe_changes_count_and_the_first_of_two_wishes_and_what_are_no_settings_are_refused():
    train = example_profile().train
    head = change("mlm_head", "dense", "sparse")  # which it is already
    wishes = [
        advice(change("micro_batch_size", 2, 4)),
        advice(change("micro_batch_size", 2, 8), head),
        advice(change("precision", "fp32", "bf16"), safe=False),
    ]
    assert safe_changes(train, wishes) == (change("micro_batch_size", 2, 4),)
    assert (
        apply_changes(train, [change("data.num_workers", 1, 5)]).data.num_workers == 5
    )
    with pytest.raises(BadInput):
        apply_changes(train, [change("micro_batch_size", 2, 0)])
