"""Settings of the trainer in a timed window."""

import os
from collections.abc import Mapping
from typing import Any

from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import with_batch_in_sequences
from trainer.formats.train_config import TrainConfig, gradient_accumulation_steps


def window_settings(
    config: Mapping[str, Any],
    dataset: TokenDataset,
    most_micro_batches: int,
    round_number: int,
) -> tuple[TrainConfig, int]:
    """Return the trainer settings of a window, and the micro-batches of its steps.

    The number of ranks is that of torchrun's environment.

    Args:
        config: Settings of the training, as JSON.
        dataset: Dataset of the training.
        most_micro_batches: Limit of micro-batches in a step of each rank.
        round_number: Number of the window's round, from 0.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings = with_batch_in_sequences(TrainConfig.model_validate(config), dataset)
    micro_batches = min(
        most_micro_batches, gradient_accumulation_steps(settings, world_size)
    )
    changes = {
        "global_batch_size": micro_batches * world_size * settings.micro_batch_size,
        # The window ends the training.
        "global_batch_tokens": None,
        "global_batch_samples": None,
        "max_epochs": None,
        # Other sequences in every round, so that their cost is noise between rounds and
        # not bias.
        "seed": settings.seed + round_number,
    }
    return settings.model_copy(update=changes), micro_batches
