"""AdamW, its parameter groups and learning rate schedule.

Its state is replicated, or sharded over ranks (ZeRO-1).
"""

import math
from typing import Any

import torch
from torch import nn

from trainer.config.train_config import TrainConfig
from trainer.distributed.ranks import Ranks


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up, then ``config.schedule``.

    ``linear`` follows Devlin et al. 2018, ``cosine`` Loshchilov and Hutter 2016 without
    restarts. ``wsd`` (warm-up, stable, decay) decays as one minus the square root,
    which Hägele et al. 2024 found best.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    first, final = config.warmup_steps, config.final_learning_rate_share
    if config.schedule == "wsd":
        first = max(
            first,
            config.max_steps - max(1, round(config.decay_share * config.max_steps)),
        )
    done = min(1.0, max(0.0, (step - first) / max(1, config.max_steps - first)))
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "wsd": 1 - math.sqrt(done),
    }
    return config.learning_rate * (final + (1 - final) * left[config.schedule])


def make_optimizer(
    module: nn.Module, config: TrainConfig, ranks: Ranks
) -> torch.optim.Optimizer:
    """Create a fused AdamW that decays matrices and embeddings, but not biases and normalisation weights."""
    parameters = [
        parameter for parameter in module.parameters() if parameter.requires_grad
    ]
    groups: list[dict[str, Any]] = [
        {
            "params": [one for one in parameters if one.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    betas = config.adam_beta1, config.adam_beta2
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": betas,
        "eps": config.adam_epsilon,
        "fused": True,
    }
    if config.parallel.strategy == "zero1" and ranks.world_size > 1:
        # Imported here, as importing it takes a second.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        # With views, each rank's weights are sent at once instead of one by one.
        options |= {
            "optimizer_class": torch.optim.AdamW,
            "parameters_as_bucket_view": True,
        }
        return ZeroRedundancyOptimizer(groups, **options)
    return torch.optim.AdamW(groups, **options)


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the AdamW that updates this rank's parameters, unwrapped from ``ZeroRedundancyOptimizer``."""
    own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return own
