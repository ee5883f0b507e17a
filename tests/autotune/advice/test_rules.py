"""Every rule has a scenario where it delivers its gain, and one where it is silent."""

from dataclasses import replace

import pytest

from autotune.advice.decide import rules
from autotune.advice.decide.apply import apply_changes, safe_changes
from autotune.advice.decide.context import TrainingContext, line, times, without
from autotune.advice.decide.rule import AdviceRule
from autotune.advice.decide.rules import (
    NOT_JUDGED,
    NOTHING,
    RULES,
    TOO_LITTLE,
    advise,
)
from autotune.errors import BadInput
from autotune.evidence.advice import Advice, Gain, SettingChange, StepPart, figure
from testbed.examples.profiles import but, example_profile
from testbed.scenarios import Scenario, ran, scenarios, tuned
from testbed.simulators.worlds import World, settings

NAMES = [*(rule.name for rule in RULES), NOTHING, NOT_JUDGED, TOO_LITTLE]
CONFIDENCES = {0.95, 0.96, 0.98}
"""Of bounds that tell noise, of a ratio of two that decide, and of bounds that
decide."""
READINGS = {"gradient noise scale"}
"""Figures whose bounds are the middle half of their measurements."""
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


def test_scenarios_cover_every_rule(every):
    assert len(set(NAMES)) == len(NAMES)
    assert {scenario.rule for scenario in every} == set(NAMES)
    assert {covered for rule in RULES for covered in rule.covers} == PAPER | CAUSES


@pytest.mark.parametrize("rule", NAMES)
def test_following_advice_delivers_its_gain(every, rule):
    for scenario in (candidate for candidate in every if candidate.rule == rule):
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


@pytest.mark.parametrize(
    ("attention", "advised"), [("full_attention", True), ("sliding_attention", False)]
)
def test_last_layer_with_window_stays_dense(attention, advised):
    train = settings(GPU, last_layer="dense")
    modernbert = train.model.config | {
        "model_type": "modernbert",
        "layer_types": ["full_attention"] * (GPU.layers - 1) + [attention],
    }
    model = train.model.model_copy(update={"config": modernbert})
    context = ran(GPU, train.model_copy(update={"model": model}))
    assert ("dense-last-layer" in {advice.rule for advice in advise(context)}) == (
        advised
    )


def test_far_kernel_on_a_cpu_asks_for_no_search(every):
    (scenario,) = (one for one in every if one.rule == "far-kernel")
    context = scenario.speaks
    on_cpu = replace(context, train=context.train.model_copy(update={"device": "cpu"}))
    (far,) = (one for one in advise(on_cpu) if one.rule == "far-kernel")
    assert far.severity == "info"
    assert far.command is None


def test_orders_errors_before_gains():
    advice = advise(tuned(GPU, settings(GPU, precision="fp32"), micro_batch_size=10**6))
    assert advice[0].severity == "error"
    speedups = [
        1.0 if entry.gain is None else entry.gain.speedup for entry in advice[1:]
    ]
    assert speedups == sorted(speedups, reverse=True)
    hours = Gain(of="GPU-hours", ratio=0.4, known="predicted")
    tokens = Gain(of="tokens to the same loss", ratio=0.5, known="predicted")
    assert (hours.speedup, tokens.speedup) == (1.0, 2.0)  # money is no time


def test_recommends_each_change_once():
    for seed in range(4):
        for scenario in scenarios(seed):
            targets = [advice.target for advice in advise(scenario.speaks)]
            assert len(set(targets)) == len(targets), scenario.what


def test_one_recommendation_has_the_evidence_of_all_rules(monkeypatch):
    def rule_with(name):
        advice = Advice(
            claim=name,
            evidence=(figure(name, 1.0, "count", "a test"),),
            cost="none",
            changes=(SettingChange(key="compile", old=False, new=True),),
            would_change="nothing",
        )
        return AdviceRule(
            name=name, covers=(), looks_for="", looks=lambda context: advice
        )

    monkeypatch.setattr(rules, "RULES", (rule_with("first"), rule_with("second")))
    (advice,) = advise(TrainingContext(train=None))
    assert advice.rule == "first"
    assert [entry.name for entry in advice.evidence] == ["first", "second"]


def test_good_settings_are_left_alone():
    advice = advise(ran(GPU, settings(GPU)))
    assert NOT_JUDGED in [entry.rule for entry in advice]
    assert NOTHING not in [entry.rule for entry in advice]
    assert all(entry.severity == "info" for entry in advice)
    advice = [
        entry.rule
        for entry in advise(
            replace(ran(GPU, settings(GPU, layout="padded")), data=None)
        )
    ]
    assert NOTHING not in advice
    assert "padding" in advice
    assert [entry.rule for entry in advise(TrainingContext(train=None))] == [TOO_LITTLE]


@pytest.mark.parametrize(
    ("driver", "known"), [("580.1", "measured"), ("0.0 (nullgpu)", "allocator")]
)
def test_peaks_of_simulated_gpu_come_from_allocator(every, driver, known):
    context = next(
        scenario.speaks for scenario in every if scenario.rule == "beyond-memory"
    )
    profile = but(context.profile, fingerprint={"driver": driver})
    context = replace(context, profile=profile)
    [advice] = [entry for entry in advise(context) if entry.rule == "beyond-memory"]
    peaks = [figure for figure in advice.evidence if "peak" in figure.name]
    assert [peak.known for peak in peaks] == [known]


def test_line_has_no_negative_intercept_or_slope():
    assert line([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1, 2))
    assert line([1, 2], [1.0, 3.0]) == pytest.approx((0, 2))
    assert line([1, 2], [2.0, 1.0]) == pytest.approx((1.2, 0))
    # A profile may hold any integer.
    assert line([1, 2**70], [1.0, 2.0]) == pytest.approx((1, 2**-70))


def test_only_measured_bounds_name_a_confidence(all_advice):
    figures = [known for advice in all_advice for known in advice.evidence]
    gains = [advice.gain for advice in all_advice if advice.gain is not None]
    for known in (*figures, *gains):
        assert known.confidence is None or known.low is not None
    bounded_figures = [known for known in figures if known.low is not None]
    bounded_gains = [gain for gain in gains if gain.low is not None]
    assert bounded_figures
    for bounded in bounded_figures:
        is_interval = bounded.known != "assumed" and bounded.name not in READINGS
        assert (bounded.confidence in CONFIDENCES) == is_interval, bounded
    for gain in bounded_gains:
        assert gain.confidence in CONFIDENCES or gain.known != "measured"
    assert any(gain.confidence is None for gain in bounded_gains)


def test_assumed_bounds_name_no_confidence():
    assert without(MEASURED).confidence == 0.95
    assumed = without(MEASURED, (0.0, 0.5, 1.0))
    unmeasured = (
        without(StepPart(cause="data loading", share=0.2)),
        assumed,
        times(without(MEASURED), (1.0, 1.1, 1.2)),
    )
    assert [gain.confidence for gain in unmeasured] == [None] * 3


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


def test_only_safe_changes_count():
    profile = example_profile()
    head = change("mlm_head", "dense", "sparse")  # which it is already
    wishes = [
        advice(change("micro_batch_size", 2, 4)),
        advice(change("micro_batch_size", 2, 8), head),
        advice(change("precision", "fp32", "bf16"), safe=False),
    ]
    assert safe_changes(profile, wishes) == (change("micro_batch_size", 2, 4),)


def test_apply_changes_rejects_invalid_value():
    train = example_profile().train
    assert (
        apply_changes(train, [change("data.num_workers", 1, 5)]).data.num_workers == 5
    )
    with pytest.raises(BadInput):
        apply_changes(train, [change("micro_batch_size", 2, 0)])
