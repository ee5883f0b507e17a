"""Request for the training that ends a confirmation."""

from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from autotune.trials.values import JobName, TrialRequest
from autotune.workers.values import CallTable


class SubjectTrainingRequest(TrialRequest):
    """Request for a short training by a subject's functions, in a fresh process."""

    job: ClassVar[JobName] = "short_training"

    step: CallTable
    """Function that builds the step, or that trains until it is stopped."""
    loader: CallTable | None
    """Function that builds the loader; None if the step has its own data."""
    unit: str
    """Unit of the work that the step or the loader counts."""
    units_per_micro_batch: PositiveFloat
    """Units of a micro-batch of a step that has its own data."""
    queued_batches: int
    """Batches that the loader may hold ready."""
    device: Literal["cpu", "cuda"]
    """Device of the step."""
    seconds: PositiveFloat
    """Time from the start of the process until the training is stopped."""
    local_ranks: PositiveInt
    """Ranks on this node, which train together."""
    source_sha256: str
    """Hash of the source of your functions; empty for those of installed packages."""
