"""Requests and evidence of a sweep of DataLoader workers."""

from typing import ClassVar

from autotune.trials.values import JobName, TrialRequest
from trainer.config.train_config import TrainConfig

MOST_MICRO_BATCHES = 4
"""Limit of micro-batches in a step of a window, unless a request sets another one. The
last one synchronises gradients and updates the weights, as in training."""


class TrainingRequest(TrialRequest):
    """Request to train for a timed window on the dataset, or on cached batches."""

    job: ClassVar[JobName] = "training"

    config: TrainConfig
    """Trainer settings, with the loader settings to try."""
    cached: bool
    """True if batches are cached, which gives the upper bound without data loading."""
    round: int
    """Number of the round, from 0; its windows read sequences in the same order."""
    interleaved_with: list[str]
    """Names of all windows of the round."""
    storage: str
    """File system that the dataset is read from."""
    window_s: float
    """Least duration of the window."""
    min_steps: int
    """Fewest optimizer steps of the window."""
    local_ranks: int
    """Ranks that train together on this node."""
    replayed_step_s: float | None
    """Time of a replayed micro-batch in seconds; None runs the trainer's own step."""
    sample_delay_s: float
    """Delay added to the reading of each sample."""
    most_micro_batches: int = MOST_MICRO_BATCHES
    """Limit of micro-batches in a step of the window."""
    losses: bool = False
    """True if the loss of each step is reported."""
