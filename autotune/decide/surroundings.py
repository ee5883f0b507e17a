"""What a GPU holds beside a traced step, before anything was measured on it: assumed, with the range it was seen in."""

import math
from dataclasses import dataclass

from autotune.decide.memory import Surroundings

MIB, GIB = 2**20, 2**30

CONTEXT_BYTES = (int(0.42 * GIB), int(0.6 * GIB), int(0.92 * GIB))
"""Of CUDA itself, least, usual and most: public reports for GPUs from Ampere on, by how many kernels were loaded."""
COMMUNICATION_BYTES = (int(0.5 * GIB), GIB, 2 * GIB)
"""Of NCCL with 2 to 8 ranks on a node, least, usual and most; public reports."""
WORKSPACE_BYTES = {True: 32 * MIB, False: 8320 * 1024}
"""Of cuBLAS, by whether the GPU is a Hopper or later: torch's documented defaults of CUBLAS_WORKSPACE_CONFIG."""
_HOPPER = (9, 0)
WORKSPACES = 2
"""One for the thread of forward, one for that of backward."""
LIBRARIES_BYTES = (4 * MIB, 38 * MIB, 52 * MIB)
"""On a CPU: matrix libraries' scratch and code, stacks, Python's objects. Measured with five models on two cores of an
Intel Xeon with AMX (33 to 52 MiB), on one (18 MiB and more), and with two models on an AMD EPYC: 11 MiB on two cores,
6 on one."""
UNTRACED_SHARE = {"cpu": 0.005, "cuda": 0.03}
"""Of what grows with the micro-batch: how much kernels may need that a trace cannot see; measured on a CPU, on a GPU
assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is assumed, and the range."""

    least: Surroundings
    usual: Surroundings
    most: Surroundings


def expected_on_gpu(
    compute_capability: tuple[int, int] | None, local_ranks: int, device_bytes: float = math.inf
) -> Expected:
    """Return what lies around a step on a GPU of so many that one node uses.

    Args:
        compute_capability: Of the GPU; None for a recent one.
        local_ranks: Ranks on the node.
        device_bytes: The GPU's memory, if it is known.
    """
    hopper = compute_capability is None or compute_capability >= _HOPPER
    workspaces = (WORKSPACE_BYTES[hopper],) * WORKSPACES
    least, usual, most = (
        Surroundings(
            kind="cuda",
            workspaces_bytes=workspaces,
            outside_bytes=context + (communication if local_ranks > 1 else 0),
            device_bytes=device_bytes,
        )
        for context, communication in zip(CONTEXT_BYTES, COMMUNICATION_BYTES, strict=True)
    )
    return Expected(least=least, usual=usual, most=most)


def expected_on_cpu() -> Expected:
    """What libraries and threads of a process take for themselves on a CPU."""
    least, usual, most = (Surroundings(kind="cpu", outside_bytes=size) for size in LIBRARIES_BYTES)
    return Expected(least=least, usual=usual, most=most)
