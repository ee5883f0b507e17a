"""Evidence on the kernels of a training step, as a profile stores it."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from autotune.trials.job_figures import KernelTime, Roofline
from trainer.formats.tables import StrictTable


class StepKernels(StrictTable):
    """Kernels of an optimizer step with the settings of a profile.

    On a CPU, operators take the place of kernels.
    """

    micro_batch_size: PositiveInt
    """Sequences of the micro-batch."""
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
