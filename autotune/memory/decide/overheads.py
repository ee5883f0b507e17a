"""Memory that a device needs in addition to the traced allocations, with its range."""

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autotune.base.units import MIB

DeviceKind = Literal["cpu", "cuda"]
_GIB = 2**30


class BytesRange(NamedTuple):
    """An assumed amount of memory in bytes, with the bounds of its range."""

    least: int
    usual: int
    most: int


CONTEXT_BYTES = BytesRange(
    least=int(0.42 * _GIB), usual=int(0.73 * _GIB), most=int(0.92 * _GIB)
)
"""Memory of a CUDA context, which grows with the number of loaded kernels.

Bounds: public reports for GPUs from Ampere on. Usual: measured on an H100 with driver
580 and CUDA 13, with both BERT presets (``reports/gpu/``).
"""
COMMUNICATION_BYTES = BytesRange(least=int(0.5 * _GIB), usual=_GIB, most=2 * _GIB)
"""Memory of NCCL with 2 to 8 ranks on a node, by public reports."""
NO_COMMUNICATION_BYTES = BytesRange(least=0, usual=0, most=0)
"""Memory of NCCL with a single rank on a node, which has no communicator."""
HOPPER_CAPABILITY = (9, 0)
"""Compute capability from which torch allocates the larger cuBLAS workspace."""
HOPPER_WORKSPACE_BYTES = 32 * MIB
"""cuBLAS workspace of a Hopper or later: torch's documented default of
CUBLAS_WORKSPACE_CONFIG."""
OLDER_WORKSPACE_BYTES = 8320 * 1024
"""cuBLAS workspace of a GPU before Hopper: torch's documented default."""
WORKSPACES = 2
"""Number of cuBLAS workspaces: the threads of forward and backward have one each."""
LIBRARIES_BYTES = BytesRange(least=4 * MIB, usual=38 * MIB, most=52 * MIB)
"""Memory of libraries and threads of a process on a CPU.

Measured with five models on two cores of an Intel Xeon with AMX (33 to 52 MiB), on one
core (18 MiB and more), and with two models on an AMD EPYC: 11 MiB on two cores, 6 MiB
on one.
"""
UNTRACED_SHARE = {"cpu": 0.005, "cuda": 0.03}
"""Share of the memory that grows with the micro-batch by which a trace may be too high
or too low, by device: kernels use memory without a traced allocation. Measured on CPUs,
assumed on GPUs."""
MEASURED_TORCH = "2.11"
"""Version of torch whose compiled steps were measured on a GPU (docs/benchmarks.md)."""
NEWER_TORCH_SHARE = 0.13
"""Share by which traces of compiled steps by newer torch may be too low.

A sequence of bert-120m took 177 MB on an H100 with torch 2.11. Traced with torch 2.13
it takes 154 MB, 13 % less, as that version keeps less for backward. No GPU has
confirmed the difference, so it may be smaller.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverheads:
    """Memory that a device needs in addition to the traced allocations."""

    kind: DeviceKind
    """Device, whose allocator the trace is replayed through."""
    workspaces_bytes: tuple[int, ...] = ()
    """Sizes of blocks of PyTorch's allocator that libraries take once and keep."""
    non_pytorch_bytes: int = 0
    """Non-PyTorch memory: context, handles, communication."""
    device_bytes: float = math.inf
    """Total memory of the device; the allocator chooses other blocks when addresses are
    scarce."""


class OverheadsRange(NamedTuple):
    """Assumed overheads of a device, with the bounds of their range."""

    least: MemoryOverheads
    usual: MemoryOverheads
    most: MemoryOverheads


def unconfirmed_share(device: str, torch_version: str, *, is_compiled: bool) -> float:
    """Return the share by which the trace of a step may be too low.

    It is 0 unless torch is newer than the version that was measured.

    Args:
        device: ``cuda`` or ``cpu``.
        torch_version: Version of torch whose step was traced, such as ``2.13.0+cpu``.
        is_compiled: True if torch.compile compiles the layers.
    """
    traced_release = [int(number) for number in re.findall(r"\d+", torch_version)[:2]]
    measured_release = [int(number) for number in MEASURED_TORCH.split(".")]
    is_newer = traced_release > measured_release
    if device == "cuda" and is_compiled and is_newer:
        return NEWER_TORCH_SHARE
    return 0.0


def overheads_on_gpu(
    compute_capability: tuple[int, int] | None,
    local_ranks: int,
    device_bytes: float = math.inf,
) -> OverheadsRange:
    """Return a GPU's overheads.

    Args:
        compute_capability: Major and minor; None for that of a Hopper.
        local_ranks: Ranks of the node; with several, NCCL takes memory too.
        device_bytes: Total memory of the GPU.
    """
    workspace_bytes = HOPPER_WORKSPACE_BYTES
    if compute_capability is not None and compute_capability < HOPPER_CAPABILITY:
        workspace_bytes = OLDER_WORKSPACE_BYTES
    nccl = COMMUNICATION_BYTES if local_ranks > 1 else NO_COMMUNICATION_BYTES

    def overheads(non_pytorch_bytes: int) -> MemoryOverheads:
        return MemoryOverheads(
            kind="cuda",
            workspaces_bytes=(workspace_bytes,) * WORKSPACES,
            non_pytorch_bytes=non_pytorch_bytes,
            device_bytes=device_bytes,
        )

    return OverheadsRange(
        least=overheads(CONTEXT_BYTES.least + nccl.least),
        usual=overheads(CONTEXT_BYTES.usual + nccl.usual),
        most=overheads(CONTEXT_BYTES.most + nccl.most),
    )


def overheads_on_cpu() -> OverheadsRange:
    """Return a CPU's overheads: libraries and threads of a process."""

    def overheads(libraries_bytes: int) -> MemoryOverheads:
        return MemoryOverheads(kind="cpu", non_pytorch_bytes=libraries_bytes)

    return OverheadsRange(
        least=overheads(LIBRARIES_BYTES.least),
        usual=overheads(LIBRARIES_BYTES.usual),
        most=overheads(LIBRARIES_BYTES.most),
    )
