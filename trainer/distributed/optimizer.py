"""AdamW, its parameter groups and learning rate schedule.

Its state is replicated, or sharded over ranks (ZeRO-1).
"""

import math
from typing import Any

import torch
from torch import nn

from trainer.formats.train_config import TrainConfig
from trainer.runtime.ranks import Ranks


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0.

    It rises linearly in the warm-up, and then follows ``config.schedule``. ``linear``
    is that of Devlin et al. 2018, ``cosine`` that of Loshchilov and Hutter 2016 without
    restarts. ``wsd`` (warm-up, stable, decay) decays as one minus the square root,
    which Hägele et al. 2024 found best.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_begin = _decay_begin(config)
    decay_steps = max(1, config.max_steps - decay_begin)
    progress = min(1.0, max(0.0, (step - decay_begin) / decay_steps))
    final_share = config.final_learning_rate_share
    share = final_share + (1 - final_share) * _share_left(config.schedule, progress)
    return config.learning_rate * share


def _decay_begin(config: TrainConfig) -> int:
    """Return the step at which the learning rate begins to fall."""
    if config.schedule != "wsd":
        return config.warmup_steps
    decay_steps = max(1, round(config.decay_share * config.max_steps))
    return max(config.warmup_steps, config.max_steps - decay_steps)


def _share_left(schedule: str, progress: float) -> float:
    """Return the share of the learning rate's fall that is left, from 1 to 0.

    Args:
        schedule: Name of the schedule; ``constant`` never falls.
        progress: Share of the steps of the fall that are finished, from 0 to 1.
    """
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    if schedule == "wsd":
        return 1 - math.sqrt(progress)
    return 1.0


def make_optimizer(
    module: nn.Module, config: TrainConfig, ranks: Ranks
) -> torch.optim.Optimizer:
    """Create a fused AdamW.

    It decays matrices and embeddings, but not biases and normalisation weights.
    """
    trained = [
        parameter for parameter in module.parameters() if parameter.requires_grad
    ]
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in trained if parameter.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for parameter in trained if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "fused": True,
    }
    if config.parallel.strategy == "zero1" and ranks.world_size > 1:
        # Imported here, as importing it takes a second.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            groups,
            optimizer_class=torch.optim.AdamW,
            # Each rank's weights are sent at once instead of one by one.
            parameters_as_bucket_view=True,
            **options,
        )
    return torch.optim.AdamW(groups, **options)


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the AdamW that updates this rank's parameters.

    With zero1 it is inside the ``ZeroRedundancyOptimizer``.
    """
    # By its attribute, not its class, which takes a second to import.
    unwrapped: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return unwrapped
