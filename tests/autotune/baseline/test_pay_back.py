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


@pytest.mark.parametrize("odd", ["2", None, 0, -3, 1.5])
def test_a_trial_costs_its_time_on_every_rank_that_it_kept_busy_and_what_is_no_count_is_one(
    odd,
):
    assert Trial(job="step", measured={"local_ranks": odd}, timeout_s=1.0).ranks == 1
    trials = [
        trial("step", 10, local_ranks=2),
        trial("step", 5),
        trial("links", 3, nodes=2, ranks_per_node=4),
    ]
    found = [
        (row.job, row.trials, row.seconds, row.rank_seconds)
        for row in cost_rows(trials)
    ]
    assert found == [("step", 2, 15, 25), ("links", 1, 3, 24)]


@given(st.floats(0, 1e9), st.floats(1.01, 100), st.floats(1.01, 100))
def test_twice_as_fast_pays_back_after_as_many_hours_as_it_cost_and_what_is_not_faster_never_does(
    cost_s, one, other
):
    later, sooner = sorted((one, other))
    assert (
        pay_back(cost_s, baseline(sooner)).rank_hours
        <= pay_back(cost_s, baseline(later)).rank_hours
    )
    found = pay_back(3600.0, baseline(2.0, 5 / 3, 2.5))
    assert [
        found.rank_hours,
        found.rank_hours_low,
        found.rank_hours_high,
    ] == pytest.approx([1.0, 0.4 / 0.6, 0.6 / 0.4])
    assert pay_back(3600.0, baseline(1.0)).rank_hours is None
    assert pay_back(3600.0, baseline(1.1, 0.9, 1.25)).rank_hours_high is None
    # Nobody compared.
    assert pay_back(3600.0, None) is pay_back(3600.0, baseline(None)) is None
