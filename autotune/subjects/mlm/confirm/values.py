"""Request for the training that ends a confirmation of the bundled trainer."""

from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt

from autotune.trials.values import JobName, TrialRequest
from trainer.formats.train_config import TrainConfig


class ShortTrainingRequest(TrialRequest):
    """Request for a short training by the trainer's own command."""

    job: ClassVar[JobName] = "short_training"

    config: TrainConfig
    """Settings of the profile."""
    seconds: PositiveFloat
    """Time from the start of the processes until they are ended."""
    step_s: PositiveFloat
    """Expected time of an optimizer step."""
    local_ranks: PositiveInt
    """Ranks on this node."""
