"""Errors that show that another rank is lost, and those that do not."""

import pytest
from torch.distributed import DistBackendError, DistStoreError

from trainer.distributed.rank_errors import is_lost_rank_error


def nccl_error(code, *, last_error=""):
    """Return an error of NCCL as torch reports it, with NCCL's last logged error."""
    return DistBackendError(
        f"NCCL error in: NCCLUtils.cpp:92, text, NCCL version 2.30.7\n{code}\nLast"
        f" error:\n{last_error}"
    )


before_or_after_rehearsal = pytest.mark.parametrize(
    "rehearsed",
    [
        pytest.param(False, id="before the rehearsal"),
        pytest.param(True, id="after the rehearsal"),
    ],
)


@before_or_after_rehearsal
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            nccl_error(
                "ncclSystemError: System call failed.",
                last_error="Call to recv failed : Connection reset by peer",
            ),
            id="connection reset",
        ),
        pytest.param(
            nccl_error(
                "ncclInternalError: Internal check failed.",
                last_error="Connection closed by remote peer",
            ),
            id="connection closed",
        ),
        pytest.param(
            nccl_error(
                "ncclRemoteError: A call failed possibly due to a network error"
            ),
            id="network error",
        ),
        pytest.param(
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"
                " [127.0.0.1]:3333"
            ),
            id="gloo",
        ),
        pytest.param(DistStoreError("wait timeout after 60000ms"), id="store"),
    ],
)
def test_lost_connection_is_a_lost_rank(error, rehearsed):
    assert is_lost_rank_error(error, rehearsed=rehearsed)


@before_or_after_rehearsal
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            nccl_error("ncclUnhandledCudaError: Call to CUDA function failed."),
            id="fault of this GPU",
        ),
        pytest.param(
            nccl_error("ncclInternalError: Internal check failed."), id="fault of NCCL"
        ),
        pytest.param(RuntimeError("shapes differ"), id="other error"),
    ],
)
def test_fault_of_this_rank_is_no_lost_rank(error, rehearsed):
    assert not is_lost_rank_error(error, rehearsed=rehearsed)


def test_system_error_after_the_rehearsal_is_lost_rank():
    # The rehearsal creates all communicators, so before it this node is at fault.
    error = nccl_error(
        "ncclSystemError: System call failed.",
        last_error="Error: failed to extend /dev/shm/nccl-x",
    )
    assert not is_lost_rank_error(error, rehearsed=False)
    assert is_lost_rank_error(error, rehearsed=True)
