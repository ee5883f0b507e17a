"""What the accounts of a trial's ranks add up to."""

import pytest

from autotune.core.outcome import Crashed, HostOutOfMemory, Measured, OutOfMemory, TimedOut
from autotune.errors import BadInput, MachineLacks
from autotune.measure.machine import classify

FITS = {"status": "measured", "figures": {"rank": 0}}
REFUSED = {"status": "out_of_memory", "detail": "refused"}
BROKEN = {"status": "crashed", "detail": "broken"}
LOST = {"status": "lost_peer", "detail": "Connection closed by peer"}


def account(result=None, ended_s=1.0, *, exit_code=1, killed=False, log_tail=""):
    return {"result": result, "exit_code": exit_code, "killed": killed, "ended_s": ended_s, "log_tail": log_tail}


def outcome_of(*ranks, timed_out=False, killed_by_kernel=False):
    return classify({"ranks": list(ranks), "timed_out": timed_out, "killed_by_kernel": killed_by_kernel}, 5)


def test_rank_0_speaks_for_all_that_fit():
    other = {"status": "measured", "figures": {"rank": 1}}
    assert outcome_of(account(FITS), account(other)) == Measured(figures={"rank": 0})


def test_a_rank_alone_is_not_named():
    assert outcome_of(account(REFUSED)) == OutOfMemory(detail="refused")
    assert outcome_of(account(BROKEN)) == Crashed(detail="broken")


def test_a_refusal_of_all_ranks_is_nobodys_own():
    assert outcome_of(account(REFUSED, 2.0), account(REFUSED, 1.0)) == OutOfMemory(detail="refused")


@pytest.mark.parametrize(
    "other",
    [
        account(LOST, 2.0),
        account(LOST, 0.5),  # written before the refused rank was found dead
        account(killed=True, exit_code=-9, ended_s=0.5),
        account(BROKEN, 2.0),
        account(FITS, 0.5),
    ],
)
def test_a_refused_rank_decides_over_those_that_it_took_with_it(other):
    assert outcome_of(other, account(REFUSED, 1.0)) == OutOfMemory(detail="rank 1 of 2: refused")


def test_a_crash_before_a_refusal_is_a_crash():
    assert outcome_of(account(BROKEN, 1.0), account(REFUSED, 2.0)) == Crashed(detail="rank 0 of 2: broken")


def test_a_refusal_that_could_not_be_raised_counts():
    aborted = account(exit_code=-6, ended_s=1.0, log_tail="terminate called: std::bad_alloc")
    outcome = outcome_of(account(LOST, 0.9), aborted)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.detail.startswith("rank 1 of 2: ")


def test_a_rank_that_the_kernel_killed_is_named_and_one_that_the_server_killed_is_not():
    ours = account(exit_code=-9, killed=True, ended_s=0.5)
    outcome = outcome_of(ours, account(exit_code=-9), killed_by_kernel=True)
    assert isinstance(outcome, HostOutOfMemory)
    assert outcome.detail.startswith("rank 1 of 2: ")


def test_a_rank_that_somebody_killed_is_a_crash():
    outcome = outcome_of(account(LOST), account(exit_code=-9))
    assert outcome == Crashed(detail="rank 1 of 2: exit code -9: ")


def test_ranks_that_lost_each_other_crashed():
    assert outcome_of(account(LOST, 2.0), account(LOST, 1.0)) == Crashed(
        detail="rank 1 of 2: Connection closed by peer"
    )


def test_a_trial_beyond_its_limit_is_late_whatever_some_ranks_wrote():
    assert outcome_of(account(FITS), account(exit_code=-9, killed=True), timed_out=True) == TimedOut(
        detail="killed after 5 s"
    )


@pytest.mark.parametrize("kind", [BadInput, MachineLacks])
def test_what_a_rank_cannot_use_is_no_measurement(kind):
    unusable = {"status": "refused", "message": "not usable", "next_step": "Get one.", "exit_code": kind.exit_code}
    with pytest.raises(kind, match="not usable"):
        outcome_of(account(unusable), account(killed=True, exit_code=-9))
