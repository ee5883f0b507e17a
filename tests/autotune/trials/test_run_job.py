"""The status that a job writes if it fails."""

import json

import pytest
import torch

from autotune.trials.jobs.run_job import run_job


def status_of_failure(result_file, message, **local):
    """Run a job that raises this message, and return the status that it writes.

    Args:
        result_file: File to which the job writes its result.
        message: Message of the error.
        local: Local input of the job.
    """
    measured = {"fault": f"raise {message}"}
    assert not run_job("testbed.failing_job", result_file, measured, local)
    return json.loads(result_file.read_text())["status"]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        pytest.param(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"
            " `cublasCreate(handle)`",
            "out_of_memory",
            id="cuBLAS without memory",
        ),
        pytest.param(
            "Last error:\nCuda failure 2 'out of memory'\nncclRemoteError",
            "out_of_memory",
            id="NCCL without memory, not a lost peer",
        ),
        pytest.param(
            "[gloo/transport/tcp/pair.cc:534] Connection closed by peer",
            "lost_peer",
            id="gloo without its peer",
        ),
        pytest.param(
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "crashed", id="cuBLAS fault"
        ),
    ],
)
def test_job_writes_how_it_failed(tmp_path, message, status):
    assert status_of_failure(tmp_path / "rank-0.json", message) == status


@pytest.mark.parametrize(
    ("message", "status_of_first_attempt"),
    [
        pytest.param(
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",
            "crashed",
            id="memory not mentioned",
        ),
        pytest.param(
            "CUDA error: out of memory: CUBLAS_STATUS_INTERNAL_ERROR",
            "out_of_memory",
            id="memory mentioned",
        ),
    ],
)
def test_repeated_cublas_fault_is_out_of_memory(
    tmp_path, monkeypatch, message, status_of_first_attempt
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    # 1 MiB of 64 GiB is free.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**36))
    result_file = tmp_path / "rank-0.json"
    first = status_of_failure(result_file, message, first_attempt=True)
    second = status_of_failure(result_file, message)
    assert first == status_of_first_attempt
    assert second == "out_of_memory"


def test_unseen_directory_ends_no_rank(tmp_path):
    elsewhere = tmp_path / "on the first node" / "rank-1.json"
    assert run_job("testbed.failing_job", elsewhere, {"fault": "none"}, {})
    assert not elsewhere.exists()
