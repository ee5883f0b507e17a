"""The benchmark of advice: what counts as a kept promise, its bars, and real trainings
with a known limit."""

import platform

import pytest

from autotune.advice.decide.bottleneck import bottleneck_of_run
from autotune.advice.decide.rules import advise
from autotune.advice.read_context import context_of_run
from autotune.advice.values import Gain
from autotune.machine.host import SystemHost
from benchmarks.advice import LIMITED, _bars, is_kept
from testbed.simulators.trainings import make_place, train

WIDE = Gain(of="non-padding tokens/s", ratio=1.5, low=1.0, high=2.0, known="predicted")
EXACT = Gain(of="GPU memory", ratio=0.6, known="measured")


@pytest.mark.parametrize(
    ("gain", "delivered", "kept"),
    [
        (WIDE, 1.5, True),
        (WIDE, 1.3, True),
        (WIDE, 1.0, False),
        (WIDE, 0.9, False),
        (WIDE, 2.5, False),
        (EXACT, 0.62, True),
        (EXACT, 0.9, False),
        (EXACT, 0.2, False),
    ],
)
def test_a_promise_is_kept_within_its_interval_and_by_half_of_it_at_least(
    gain, delivered, kept
):
    assert is_kept(gain, delivered, noise=0.0) is kept


def test_bars_of_what_was_not_measured_are_not_held():
    bars = {
        bar.name: bar
        for bar in _bars({"limits": [{"cause": "data loading", "judged": "network"}]})
    }
    assert bars["advice_real_causes_right_count"].figure == 0
    assert bars["advice_simulated_causes_right_share"].holds is None


REAL = [
    pytest.param(
        *one,
        id=one[0],
        marks=pytest.mark.slow if one[0].startswith("two hosts") else pytest.mark.soak,
    )
    for one in LIMITED
]


@pytest.mark.system
@pytest.mark.parametrize(("what", "cause", "run"), REAL)
def test_a_real_training_is_judged_by_what_limits_it(tmp_path, what, cause, run):
    found = run(make_place(tmp_path))
    assert bottleneck_of_run(found).limit == cause, what
    behind = [
        one.claim
        for one in advise(context_of_run(found, SystemHost()))
        if one.rule == "starved-rank"
    ]
    assert len(behind) == ("the second" in what)
    assert all(f"rank 1 on {platform.node()} waits" in claim for claim in behind)


def test_a_training_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no_such_setting"):
        train(make_place(tmp_path), "broken", no_such_setting=1)
