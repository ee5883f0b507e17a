"""Values of distributed training.

They are links, compute of a rank, and gradient synchronisation.
"""

from typing import ClassVar

from autotune.trials.values import JobName, TrialRequest
from trainer.formats.train_config import TrainConfig


class LinksRequest(TrialRequest):
    """Request to time all-reduces of several sizes between ranks."""

    job: ClassVar[JobName] = "links"

    sizes_bytes: list[int]
    repeats: int
    seconds: float
    """Time limit for each size."""
    nodes: int
    ranks_per_node: int


class GradientSyncRequest(TrialRequest):
    """Request to train all ranks on cached batches of the dataset."""

    job: ClassVar[JobName] = "gradient_sync"

    config: TrainConfig
    """Trainer settings, with the gradient synchronisation to try."""
    steps: int
    synchronise: bool
    """True if gradients are synchronised; False skips only that (DDP and ZeRO-1)."""
    round: int
    nodes: int
    ranks_per_node: int
