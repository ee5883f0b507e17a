"""The benchmark of advice: kept promises, bars, and trainings with a known limit."""

import platform

import pytest

from autotune.advice.decide.bottleneck import bottleneck_of_run
from autotune.advice.decide.rules import advise
from autotune.advice.read_context import context_of_run
from autotune.evidence.advice import Gain
from autotune.machine.host import SystemHost
from benchmarks.advice import LIMITED, _bars, is_kept
from testbed.simulators.trainings import make_place, train

WIDE = Gain(of="throughput", ratio=1.5, low=1.0, high=2.0, known="predicted")
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
def test_promise_is_kept_within_its_interval(gain, delivered, kept):
    assert is_kept(gain, delivered, noise=0.0) is kept


def test_unmeasured_bars_do_not_hold():
    bars = {
        bar.name: bar
        for bar in _bars({"limits": [{"cause": "data loading", "judged": "network"}]})
    }
    assert bars["advice_real_causes_right_count"].figure == 0
    assert bars["advice_simulated_causes_right_share"].holds is None


REAL = [
    pytest.param(
        name,
        cause,
        run,
        id=name,
        marks=pytest.mark.slow if name.startswith("two hosts") else pytest.mark.soak,
    )
    for name, cause, run in LIMITED
]


@pytest.mark.system
@pytest.mark.parametrize(("name", "cause", "run"), REAL)
def test_finds_the_limit_of_real_trainings(tmp_path, name, cause, run):
    record = run(make_place(tmp_path))
    assert bottleneck_of_run(record).limit == cause, name
    behind = [
        advice.claim
        for advice in advise(context_of_run(record, SystemHost()))
        if advice.rule == "starved-rank"
    ]
    assert len(behind) == ("the second" in name)
    assert all(f"rank 1 on {platform.node()} waits" in claim for claim in behind)


def test_failing_training_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no_such_setting"):
        train(make_place(tmp_path), "broken", no_such_setting=1)
