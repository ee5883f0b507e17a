"""How ranks account for their ends, and what the accounts of a trial's ranks add up
to."""

import json

import pytest
import torch

from autotune.errors import BadInput, MachineLacks
from autotune.trials.fork_server import classify
from autotune.trials.jobs.server import run_job
from autotune.trials.values import Crashed, HostOutOfMemory, Measured, OutOfMemory

FITS = {"status": "measured", "figures": {"rank": 0}}
REFUSED = {"status": "out_of_memory", "detail": "refused"}
BROKEN = {"status": "crashed", "detail": "broken"}
LOST = {"status": "lost_peer", "detail": "Connection closed by peer"}


def account(result=None, ended_s=1.0, *, exit_code=1, killed=False, log_tail=""):
    return {
        "result": result,
        "exit_code": exit_code,
        "killed": killed,
        "ended_s": ended_s,
        "log_tail": log_tail,
    }


def outcome_of(*ranks, killed_by_kernel=False):
    return classify(ranks, killed_by_kernel=killed_by_kernel)


def test_a_rank_alone_is_not_named_nor_is_one_where_all_were_refused_and_rank_0_speaks_for_all_that_fit():
    other = {"status": "measured", "figures": {"rank": 1}}
    assert outcome_of(account(FITS), account(other)) == Measured(figures={"rank": 0})
    assert outcome_of(account(REFUSED)) == OutOfMemory(detail="refused")
    assert outcome_of(account(BROKEN)) == Crashed(detail="broken")
    assert outcome_of(account(REFUSED, 2.0), account(REFUSED, 1.0)) == OutOfMemory(
        detail="refused"
    )


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
    assert outcome_of(other, account(REFUSED, 1.0)) == OutOfMemory(
        detail="rank 1 of 2: refused"
    )


@pytest.mark.parametrize(
    ("other", "ended", "by_kernel", "kind"),
    [
        (
            account(LOST, 0.9),
            account(exit_code=-6, log_tail="std::bad_alloc"),
            False,
            OutOfMemory,
        ),
        (
            account(killed=True, exit_code=-9, ended_s=0.5),
            account(exit_code=-9),
            True,
            HostOutOfMemory,
        ),
    ],
)
def test_a_rank_that_could_not_say_it_or_that_the_kernel_killed_is_named(
    other, ended, by_kernel, kind
):
    outcome = outcome_of(other, ended, killed_by_kernel=by_kernel)
    assert isinstance(outcome, kind)
    assert outcome.detail.startswith("rank 1 of 2: ")


@pytest.mark.parametrize(
    ("ranks", "detail"),
    [
        ([account(BROKEN, 1.0), account(REFUSED, 2.0)], "rank 0 of 2: broken"),
        # Somebody killed it.
        ([account(LOST), account(exit_code=-9)], "rank 1 of 2: exit code -9: "),
        (
            [account(LOST, 2.0), account(LOST, 1.0)],
            "rank 1 of 2: Connection closed by peer",
        ),
    ],
)
def test_the_first_rank_that_crashed_by_itself_is_named(ranks, detail):
    assert outcome_of(*ranks) == Crashed(detail=detail)


@pytest.mark.parametrize("kind", [BadInput, MachineLacks])
def test_what_a_rank_cannot_use_is_no_measurement(kind):
    unusable = {
        "status": "rejected",
        "message": "not usable",
        "next_step": "Get one.",
        "exit_code": kind.exit_code,
    }
    with pytest.raises(kind, match="not usable"):
        outcome_of(account(unusable), account(killed=True, exit_code=-9))


def status_of(file, text, **place):
    assert not run_job("testbed.failing_job", file, {"fault": f"raise {text}"}, place)
    return json.loads(file.read_text())["status"]


@pytest.mark.parametrize(
    ("text", "status"),
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
def test_a_trial_says_how_it_failed(tmp_path, text, status):
    assert status_of(tmp_path / "rank-0.json", text) == status


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "crashed"),
        ("CUDA error: out of memory: CUBLAS_STATUS_INTERNAL_ERROR", "out_of_memory"),
    ],
)
def test_a_vague_fault_near_the_limit_is_of_memory_only_if_it_comes_again(
    tmp_path, monkeypatch, text, first
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**36))
    assert status_of(tmp_path / "rank-0.json", text, first_attempt=True) == first
    assert status_of(tmp_path / "rank-0.json", text) == "out_of_memory"
