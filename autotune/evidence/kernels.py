"""Kernels of a training step, and the rates that bound them."""

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from trainer.formats.tables import StrictTable


class KernelTime(StrictTable):
    """Time of a kernel in an optimizer step; on a CPU, of an operator."""

    name: str
    calls: float
    """Calls in a step, on average."""
    seconds: float
    """Time of all calls in a step, on average."""
    bound_s: float | None = None
    """Time that the FLOPs and bytes of these calls need at least; None if the work of a
    call is not known."""
    flops: float | None = None
    """FLOPs of matmuls and attention in these calls, 0 for kernels that have none; None
    if the work is not known."""
    moved_bytes: float | None = None
    """Bytes that these calls must read and write, each tensor once; None if the work is
    not known."""


class Roofline(StrictTable):
    """Rates that a device reaches, which bound the time of its kernels."""

    bytes_per_s: PositiveFloat
    """Bytes read and written per second by a copy of a large tensor."""
    flops_per_s: PositiveFloat
    """FLOP/s of a large matmul in the precision of training."""


class StepKernels(StrictTable):
    """Kernels of an optimizer step with the settings of a profile.

    On a CPU, operators take the place of kernels.
    """

    micro_batch_size: PositiveInt
    """Size of the micro-batch, such as its sequences."""
    micro_batches: PositiveInt
    """Micro-batches of the step on each rank."""
    step_s: PositiveFloat
    """Median time of such a step without the profiler, in seconds."""
    kernels_s: NonNegativeFloat
    """Time of all kernels in a step, in seconds."""
    bound_s: NonNegativeFloat
    """Sum of the bounds of all kernels whose bound is known, in seconds."""
    unbounded_s: NonNegativeFloat
    """Time of the kernels whose bound is not known, in seconds."""
    roofline: Roofline
    """Rates of the device, measured in the same process."""
    kernels: list[KernelTime] = Field(default_factory=list)
    """The slowest kernels of a step, the slowest first."""
