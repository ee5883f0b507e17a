"""Requests and evidence of a sweep of DataLoader workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from autotune.base.defaults import TRIAL_TIMEOUT_S, WINDOW_S
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """Request for windows of training, with their time budget."""

    data: Path
    """Directory of the dataset."""
    reports: Path
    """Directory of reports, which has the trial logs."""
    budget_s: float
    """Time budget of all windows, including those from the trial log. When it is used
    up, the result may be undecided. The first three rounds may exceed it, but not
    ``budget_ends_s``."""
    local_ranks: int | None = None
    """Number of local ranks; None means as probed."""
    max_workers: int | None = None
    """Most DataLoader workers of a rank that may be tried; None means as many as CPUs
    and memory allow."""
    window_s: float = WINDOW_S
    """Least duration of a window."""
    replayed_step_s: float | None = None
    """Time of a micro-batch on the simulated GPU; None runs the training step."""
    sample_delay_s: float = 0.0
    """Delay added to the reading of each sample, which simulates slower storage."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    """Time after which a window is stopped as failed."""
    budget_ends_s: float | None = None
    """Deadline in seconds since 1970, after which no window is likely to end: a longer
    one does not start. None means that there is no deadline."""
