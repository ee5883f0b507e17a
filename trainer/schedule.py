"""The learning rate of every step. Pure, no torch here."""

import math

from trainer.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step counted from 0: a linear warm-up, then what ``config.schedule`` says.

    ``linear`` is that of Devlin et al. 2018, ``cosine`` that of Loshchilov and Hutter 2016 without restarts, ``wsd``
    (warm-up, stable, decay) falls with one minus the square root, which Hägele et al. 2024 found best.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    final = config.final_learning_rate_share
    return config.learning_rate * (final + (1 - final) * _above_final(config, step))


def _above_final(config: TrainConfig, step: int) -> float:
    """From 1 at the end of the warm-up to 0 at ``max_steps``."""
    first = config.warmup_steps
    if config.schedule == "wsd":
        first = max(first, config.max_steps - max(1, round(config.decay_share * config.max_steps)))
    done = min(1.0, max(0.0, (step - first) / max(1, config.max_steps - first)))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "wsd":
            return 1 - math.sqrt(done)
