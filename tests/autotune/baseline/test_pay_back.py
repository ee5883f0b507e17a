import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.baseline.decide.pay_back import cost_rows, pay_back
from autotune.baseline.values import BaselineEvidence, RecipeRow
from autotune.trials.values import Crashed, FinishedTrial, Trial


def trial(job, seconds, **measured):
    return FinishedTrial(
        trial=Trial(job=job, measured=measured, timeout_s=1.0),
        outcome=Crashed(detail=""),
        seconds=seconds,
        label="",
        from_trial_log=True,
    )


def baseline(speedup, low=None, high=None):
    bounds = {"speedup_low": low, "speedup_high": high}
    row = RecipeRow(
        name="hf-trainer", tokens_per_s=[1.0], speedup=speedup, outcome="ran", **bounds
    )
    return BaselineEvidence(
        rows=[row], local_ranks=2, window_s=1.0, windows=1, seconds=1.0
    )


@pytest.mark.parametrize("local_ranks", ["2", None, 0, -3, 1.5])
def test_invalid_rank_count_is_one(local_ranks):
    measured = {"local_ranks": local_ranks}
    assert Trial(job="step", measured=measured, timeout_s=1.0).ranks == 1


def test_counts_time_of_every_rank():
    trials = [
        trial("step", 10, local_ranks=2),
        trial("step", 5),
        trial("links", 3, nodes=2, ranks_per_node=4),
    ]
    costs = [
        (row.job, row.trials, row.seconds, row.rank_seconds)
        for row in cost_rows(trials)
    ]
    assert costs == [("step", 2, 15, 25), ("links", 1, 3, 24)]


@given(st.floats(0, 1e9), st.floats(1.01, 100), st.floats(1.01, 100))
def test_larger_speedup_pays_back_sooner(cost_s, speedup, other_speedup):
    later, sooner = sorted((speedup, other_speedup))
    assert (
        pay_back(cost_s, baseline(sooner)).rank_hours
        <= pay_back(cost_s, baseline(later)).rank_hours
    )


def test_pay_back_has_bounds():
    payback = pay_back(3600.0, baseline(2.0, 5 / 3, 2.5))
    assert [
        payback.rank_hours,
        payback.rank_hours_low,
        payback.rank_hours_high,
    ] == pytest.approx([1.0, 0.4 / 0.6, 0.6 / 0.4])


def test_slower_never_pays_back():
    assert pay_back(3600.0, baseline(1.0)).rank_hours is None
    assert pay_back(3600.0, baseline(1.1, 0.9, 1.25)).rank_hours_high is None


def test_without_comparison_nothing_pays_back():
    # Nobody compared.
    assert pay_back(3600.0, None) is pay_back(3600.0, baseline(None)) is None
