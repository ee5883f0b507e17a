import json

import pytest

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
