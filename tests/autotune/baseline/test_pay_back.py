"""Cost of a tuning, and the training time that pays it back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.baseline.decide.pay_back import CostRow, cost_rows, pay_back
from autotune.evidence.baseline import BaselineEvidence, BaselineRow
from autotune.trials.outcomes import Crashed
from autotune.trials.values import FinishedTrial, Trial

ONE_HOUR_S = 3600.0
SPEEDUPS = st.floats(1.01, 100)


def finished(job, seconds, **measured) -> FinishedTrial:
    return FinishedTrial(
        trial=Trial(job=job, measured=measured, timeout_s=1.0),
        outcome=Crashed(detail=""),
        seconds=seconds,
        label="",
        from_trial_log=True,
    )


def baseline(speedup, low=None, high=None) -> BaselineEvidence:
    """Return the comparison with untuned settings alone."""
    row = BaselineRow(
        name="untuned",
        subject="mlm: m",
        units_per_s=[1.0],
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        outcome="ran",
    )
    return BaselineEvidence(
        rows=[row], unit="tokens", local_ranks=2, window_s=1.0, windows=1, seconds=1.0
    )


def test_counts_time_of_every_rank():
    trials = [
        finished("step", 10, local_ranks=2),
        finished("step", 5),
        finished("links", 3, nodes=2, ranks_per_node=4),
    ]
    assert cost_rows(trials) == (
        CostRow(job="step", trials=2, seconds=10 + 5, rank_seconds=2 * 10 + 5),
        CostRow(job="links", trials=1, seconds=3, rank_seconds=2 * 4 * 3),
    )


@given(st.floats(0, 1e9), SPEEDUPS, SPEEDUPS)
def test_larger_speedup_pays_back_sooner(cost_s, speedup, other_speedup):
    smaller, larger = sorted((speedup, other_speedup))
    sooner = pay_back(cost_s, baseline(larger))
    later = pay_back(cost_s, baseline(smaller))
    assert sooner.rank_hours <= later.rank_hours


def test_pay_back_has_bounds():
    payback = pay_back(ONE_HOUR_S, baseline(2.0, low=5 / 3, high=2.5))
    # An hour of tuned training saves the speedup less one hour.
    assert payback.rank_hours == pytest.approx(1 / (2.0 - 1))
    assert payback.rank_hours_low == pytest.approx(1 / (2.5 - 1))
    assert payback.rank_hours_high == pytest.approx(1 / (5 / 3 - 1))


def test_equal_speed_never_pays_back():
    assert pay_back(ONE_HOUR_S, baseline(1.0)).rank_hours is None


def test_perhaps_slower_may_never_pay_back():
    perhaps_slower = baseline(1.1, low=0.9, high=1.25)
    assert pay_back(ONE_HOUR_S, perhaps_slower).rank_hours_high is None


@pytest.mark.parametrize(
    "comparison",
    [
        pytest.param(None, id="none"),
        pytest.param(baseline(None), id="recipe did not run"),
    ],
)
def test_without_comparison_nothing_pays_back(comparison):
    assert pay_back(ONE_HOUR_S, comparison) is None
