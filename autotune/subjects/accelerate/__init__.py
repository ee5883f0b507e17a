"""A loop with ``Accelerator`` as a subject."""

from autotune.subjects.accelerate.jobs import accelerated_step, longest_batch

__all__ = ["accelerated_step", "longest_batch"]
