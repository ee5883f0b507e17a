"""Accounts of ranks at their ends, and the outcome that they add up to."""

import json

import pytest
import torch

from autotune.errors import BadInput, MachineLacks
from autotune.trials.jobs.run_job import run_job
from autotune.trials.messages import JobResult, JobStatus, RankAccount
from autotune.trials.outcomes import Crashed, HostOutOfMemory, Measured, OutOfMemory
from autotune.trials.rank_outcomes import classify

MEASURED = JobResult(status=JobStatus.MEASURED, figures={"rank": 0})
OUT_OF_MEMORY = JobResult(status=JobStatus.OUT_OF_MEMORY, detail="too large")
CRASHED = JobResult(status=JobStatus.CRASHED, detail="broken")
LOST_PEER = JobResult(status=JobStatus.LOST_PEER, detail="Connection closed by peer")


def account(result=None, ended_s=1.0, *, exit_code=1, killed=False, log_tail=""):
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
        (OUT_OF_MEMORY, OutOfMemory(detail="too large")),
        (CRASHED, Crashed(detail="broken")),
    ],
)
def test_single_rank_is_not_named(result, outcome):
    assert classify([account(result)]) == outcome


def test_out_of_memory_on_all_ranks_names_none():
    outcome = classify([account(OUT_OF_MEMORY, 2.0), account(OUT_OF_MEMORY, 1.0)])
    assert outcome == OutOfMemory(detail="too large")


@pytest.mark.parametrize(
    "other",
    [
        account(LOST_PEER, 2.0),
        # Written before the other rank was found dead.
        account(LOST_PEER, 0.5),
        KILLED_BY_SERVER,
        account(CRASHED, 2.0),
        account(MEASURED, 0.5),
    ],
    ids=["lost later", "lost earlier", "killed", "crashed later", "measured"],
)
def test_out_of_memory_decides_over_ranks_that_followed(other):
    outcome = classify([other, account(OUT_OF_MEMORY, 1.0)])
    assert outcome == OutOfMemory(detail="rank 1 of 2: too large")


def test_rank_that_only_logged_out_of_memory_is_named():
    aborted = account(exit_code=-6, log_tail="std::bad_alloc")
    outcome = classify([account(LOST_PEER, 0.9), aborted])
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
            [account(CRASHED, 1.0), account(OUT_OF_MEMORY, 2.0)],
            "rank 0 of 2: broken",
            id="before another's out of memory",
        ),
        pytest.param(
            [account(LOST_PEER), account(exit_code=-9)],
            "rank 1 of 2: exit code -9: ",
            id="killed by another program",
        ),
        pytest.param(
            [account(LOST_PEER, 2.0), account(LOST_PEER, 1.0)],
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


def status_of_failure(result_file, message, **local):
    """Run a job that raises this message, and return the status that it writes."""
    fault = {"fault": f"raise {message}"}
    assert not run_job("testbed.failing_job", result_file, fault, local)
    return json.loads(result_file.read_text())["status"]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (
            (
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"
                " `cublasCreate(handle)`"
            ),
            "out_of_memory",
        ),
        (
            "Last error:\nCuda failure 2 'out of memory'\nncclRemoteError",
            "out_of_memory",
        ),
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer", "lost_peer"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "crashed"),
    ],
)
def test_job_writes_how_it_failed(tmp_path, message, status):
    assert status_of_failure(tmp_path / "rank-0.json", message) == status


@pytest.mark.parametrize(
    ("message", "status_of_first_attempt"),
    [
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "crashed"),
        ("CUDA error: out of memory: CUBLAS_STATUS_INTERNAL_ERROR", "out_of_memory"),
    ],
)
def test_vague_fault_is_of_memory_only_if_repeated(
    tmp_path, monkeypatch, message, status_of_first_attempt
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    # Nearly no memory is free.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**36))
    result_file = tmp_path / "rank-0.json"
    first = status_of_failure(result_file, message, first_attempt=True)
    second = status_of_failure(result_file, message)
    assert first == status_of_first_attempt
    assert second == "out_of_memory"
