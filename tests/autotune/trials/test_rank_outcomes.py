"""The outcome of a trial, from the accounts of its ranks at their ends."""

import pytest

from autotune.errors import BadInput, MachineLacks
from autotune.trials.messages import JobResult, JobStatus, RankAccount
from autotune.trials.outcomes import Crashed, HostOutOfMemory, Measured, OutOfMemory
from autotune.trials.rank_outcomes import classify

MEASURED = JobResult(status=JobStatus.MEASURED, figures={"rank": 0})
OUT_OF_MEMORY = JobResult(status=JobStatus.OUT_OF_MEMORY, detail="too large")
CRASHED = JobResult(status=JobStatus.CRASHED, detail="broken")
LOST_PEER = JobResult(status=JobStatus.LOST_PEER, detail="Connection closed by peer")


def account(result=None, *, ended_s=1.0, exit_code=1, killed=False, log_tail=""):
    """Return the account of a rank; without a result, it wrote none."""
    return RankAccount(
        result=result,
        exit_code=exit_code,
        killed=killed,
        ended_s=ended_s,
        log_tail=log_tail,
    )


KILLED_BY_SERVER = account(killed=True, exit_code=-9, ended_s=0.5)


def test_first_rank_speaks_for_all_that_measured():
    second = JobResult(status=JobStatus.MEASURED, figures={"rank": 1})
    outcome = classify([account(MEASURED), account(second)])
    assert outcome == Measured(figures={"rank": 0})


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        pytest.param(
            OUT_OF_MEMORY, OutOfMemory(detail="too large"), id="out of memory"
        ),
        pytest.param(CRASHED, Crashed(detail="broken"), id="crashed"),
    ],
)
def test_single_rank_is_not_named(result, outcome):
    assert classify([account(result)]) == outcome


def test_out_of_memory_on_all_ranks_names_none():
    outcome = classify(
        [account(OUT_OF_MEMORY, ended_s=2.0), account(OUT_OF_MEMORY, ended_s=1.0)]
    )
    assert outcome == OutOfMemory(detail="too large")


@pytest.mark.parametrize(
    "other_rank",
    [
        pytest.param(account(LOST_PEER, ended_s=2.0), id="lost its peer"),
        # A rank may notice the loss before the server finds the other rank ended.
        pytest.param(account(LOST_PEER, ended_s=0.5), id="lost its peer, seen first"),
        pytest.param(KILLED_BY_SERVER, id="killed by the server"),
        pytest.param(account(CRASHED, ended_s=2.0), id="crashed later"),
        pytest.param(account(MEASURED, ended_s=0.5), id="measured"),
    ],
)
def test_out_of_memory_of_one_rank_decides(other_rank):
    outcome = classify([other_rank, account(OUT_OF_MEMORY, ended_s=1.0)])
    assert outcome == OutOfMemory(detail="rank 1 of 2: too large")


def test_logged_out_of_memory_names_its_rank():
    aborted = account(exit_code=-6, log_tail="std::bad_alloc")
    outcome = classify([account(LOST_PEER, ended_s=0.9), aborted])
    assert isinstance(outcome, OutOfMemory)
    assert outcome.detail.startswith("rank 1 of 2: ")


def test_rank_that_the_kernel_killed_is_named():
    outcome = classify([KILLED_BY_SERVER, account(exit_code=-9)], killed_by_kernel=True)
    assert isinstance(outcome, HostOutOfMemory)
    assert outcome.detail.startswith("rank 1 of 2: ")


@pytest.mark.parametrize(
    ("ranks", "detail"),
    [
        pytest.param(
            [account(CRASHED, ended_s=1.0), account(OUT_OF_MEMORY, ended_s=2.0)],
            "rank 0 of 2: broken",
            id="before another's out of memory",
        ),
        pytest.param(
            [account(LOST_PEER), account(exit_code=-9)],
            "rank 1 of 2: exit code -9: ",
            id="killed by another program",
        ),
        pytest.param(
            [account(LOST_PEER, ended_s=2.0), account(LOST_PEER, ended_s=1.0)],
            "rank 1 of 2: Connection closed by peer",
            id="all lost their peers",
        ),
    ],
)
def test_first_crashed_rank_is_named(ranks, detail):
    assert classify(ranks) == Crashed(detail=detail)


@pytest.mark.parametrize("error_type", [BadInput, MachineLacks])
def test_unusable_input_is_no_measurement(error_type):
    rejected = JobResult(
        status=JobStatus.REJECTED,
        detail="not usable",
        next_step="Get one.",
        exit_code=error_type.exit_code,
    )
    with pytest.raises(error_type, match="not usable"):
        classify([account(rejected), account(killed=True, exit_code=-9)])
