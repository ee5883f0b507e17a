"""Schedules of learning rates in transformers. Pure."""

from dataclasses import dataclass

from autotune.profiles.decide.export.table import Scalar
from trainer.config.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirSchedule:
    """Schedule of learning rates in transformers."""

    name: str
    arguments: dict[str, Scalar]


def their_schedule(train: TrainConfig) -> TheirSchedule:
    """Return the schedule with the same learning rates after the warm-up."""
    share = train.final_learning_rate_share
    arguments: dict[str, Scalar] = {}
    if train.schedule == "constant" or (train.schedule == "linear" and share == 1):
        name = "constant_with_warmup"
    elif train.schedule == "linear" and share == 0:
        name = "linear"
    elif train.schedule == "linear":
        name = "polynomial"
        arguments = {"lr_end": share * train.learning_rate, "power": 1.0}
    elif train.schedule == "cosine" and share == 0:
        name = "cosine"
    elif train.schedule == "cosine":
        name = "cosine_with_min_lr"
        arguments = {"min_lr_rate": share}
    else:
        name = "warmup_stable_decay"
        falling_steps = max(1, round(train.decay_share * train.max_steps))
        falls_after = max(train.warmup_steps, train.max_steps - falling_steps)
        arguments = {
            "num_decay_steps": train.max_steps - falls_after,
            "decay_type": "1-sqrt",
            "min_lr_ratio": share,
        }
    return TheirSchedule(name=name, arguments=arguments)
