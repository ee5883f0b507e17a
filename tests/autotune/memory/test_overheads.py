"""Overheads of devices, and the margin for traces of newer versions of torch."""

import pytest

from autotune.memory.decide.overheads import (
    COMMUNICATION_BYTES,
    CONTEXT_BYTES,
    HOPPER_WORKSPACE_BYTES,
    NEWER_TORCH_SHARE,
    OLDER_WORKSPACE_BYTES,
    overheads_on_cpu,
    overheads_on_gpu,
    unconfirmed_share,
)

HOPPER = (9, 0)
AMPERE = (8, 0)


@pytest.mark.parametrize(
    ("capability", "workspace_bytes"),
    [
        pytest.param(HOPPER, HOPPER_WORKSPACE_BYTES, id="Hopper"),
        pytest.param((10, 0), HOPPER_WORKSPACE_BYTES, id="after Hopper"),
        pytest.param(AMPERE, OLDER_WORKSPACE_BYTES, id="before Hopper"),
        pytest.param(None, HOPPER_WORKSPACE_BYTES, id="unknown"),
    ],
)
def test_workspaces_depend_on_the_architecture(capability, workspace_bytes):
    overheads = overheads_on_gpu(capability, local_ranks=1)
    # One for the forward thread, one for the backward thread.
    assert overheads.usual.workspaces_bytes == (workspace_bytes, workspace_bytes)


@pytest.mark.parametrize("bound", ["least", "usual", "most"])
def test_only_several_ranks_have_communication(bound):
    alone = getattr(overheads_on_gpu(HOPPER, local_ranks=1), bound)
    together = getattr(overheads_on_gpu(HOPPER, local_ranks=2), bound)
    context_bytes = getattr(CONTEXT_BYTES, bound)
    nccl_bytes = getattr(COMMUNICATION_BYTES, bound)
    assert alone.non_pytorch_bytes == context_bytes
    assert together.non_pytorch_bytes == context_bytes + nccl_bytes


@pytest.mark.parametrize(
    "overheads",
    [
        pytest.param(overheads_on_cpu(), id="CPU"),
        pytest.param(overheads_on_gpu(HOPPER, local_ranks=2), id="GPU"),
    ],
)
def test_usual_overheads_lie_in_their_range(overheads):
    least, usual, most = (bound.non_pytorch_bytes for bound in overheads)
    assert least < usual < most


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0+cu130", "3.0.1"])
def test_compiled_step_of_newer_torch_is_unconfirmed(version):
    assert unconfirmed_share("cuda", version, is_compiled=True) == NEWER_TORCH_SHARE


@pytest.mark.parametrize(
    ("device", "version", "is_compiled"),
    [
        pytest.param("cuda", "2.11.0+cu130", True, id="the measured version"),
        pytest.param("cuda", "2.13.0", False, id="not compiled"),
        pytest.param("cpu", "2.13.0", True, id="on a CPU"),
    ],
)
def test_other_steps_are_confirmed(device, version, is_compiled):
    assert unconfirmed_share(device, version, is_compiled=is_compiled) == 0.0
