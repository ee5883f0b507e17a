import json

import pytest
import torch

from autotune.measure.jobs.child import run_job


def status_of(file, text, **place):
    assert not run_job("tests.failing_job", file, {"fault": f"raise {text}"}, place)
    return json.loads(file.read_text())["status"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("Last error:\nCuda failure 2 'out of memory'\nncclRemoteError", "out_of_memory"),
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
def test_a_vague_fault_near_the_limit_is_of_memory_only_if_it_comes_again(tmp_path, monkeypatch, text, first):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**36))
    assert status_of(tmp_path / "rank-0.json", text, first_attempt=True) == first
    assert status_of(tmp_path / "rank-0.json", text) == "out_of_memory"
