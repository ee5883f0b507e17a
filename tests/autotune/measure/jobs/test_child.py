import json

import pytest
import torch

from autotune.measure.jobs.child import account


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
    def job():
        raise RuntimeError(text)

    assert not account(job, tmp_path / "rank-0.json")
    assert json.loads((tmp_path / "rank-0.json").read_text())["status"] == status


@pytest.mark.parametrize(
    ("text", "first", "later"),
    [
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "crashed", "out_of_memory"),
        ("CUDA error: out of memory: CUBLAS_STATUS_INTERNAL_ERROR", "out_of_memory", "out_of_memory"),
    ],
)
def test_a_vague_fault_near_the_limit_is_of_memory_only_if_it_comes_again(tmp_path, monkeypatch, text, first, later):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**36))

    def job():
        raise RuntimeError(text)

    for first_attempt, status in ((True, first), (False, later)):
        account(job, tmp_path / "rank-0.json", first_attempt=first_attempt)
        assert json.loads((tmp_path / "rank-0.json").read_text())["status"] == status
