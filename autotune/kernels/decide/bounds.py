"""Distance of a step's kernels from their bounds. Pure."""

import math
from collections.abc import Sequence

from autotune.evidence.kernels import KernelTime, StepKernels
from autotune.trials.job_figures import KernelFigures

SLOWEST_KERNELS = 10
"""Number of kernels that evidence keeps."""
NEAR_BOUND_RATIO = 1.15
"""Largest ratio of a step's time to the sum of its kernels' bounds at which no change
of kernels is expected to pay."""


def step_kernels(
    figures: KernelFigures, *, micro_batch_size: int, micro_batches: int
) -> StepKernels:
    """Return the evidence on the kernels of a step.

    Args:
        figures: Figures of a ``kernels`` job.
        micro_batch_size: Size of a micro-batch of the job.
        micro_batches: Micro-batches of each rank in a step of the job.
    """
    bounds_s = [kernel.bound_s for kernel in figures.kernels]
    return StepKernels(
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        step_s=figures.step_s,
        kernels_s=math.fsum(kernel.seconds for kernel in figures.kernels),
        bound_s=math.fsum(bound_s for bound_s in bounds_s if bound_s is not None),
        unbounded_s=math.fsum(
            kernel.seconds for kernel in figures.kernels if kernel.bound_s is None
        ),
        roofline=figures.roofline,
        kernels=list(figures.kernels[:SLOWEST_KERNELS]),
    )


def distance_s(kernel: KernelTime) -> float | None:
    """Return by how much a kernel exceeds its bound in a step, in seconds.

    Returns:
        At least 0; None if the bound is not known.
    """
    if kernel.bound_s is None:
        return None
    return max(0.0, kernel.seconds - kernel.bound_s)


def farthest_kernel(kernels: Sequence[KernelTime]) -> KernelTime | None:
    """Return the kernel that is farthest from its bound; None if no bound is known."""
    known = [kernel for kernel in kernels if kernel.bound_s is not None]
    return max(known, key=lambda kernel: distance_s(kernel) or 0.0, default=None)


def is_near_bound(step: StepKernels) -> bool:
    """Return whether a step takes little longer than the sum of its kernels' bounds.

    Kernels whose bound is not known have none in this sum.
    """
    return step.step_s <= NEAR_BOUND_RATIO * step.bound_s
