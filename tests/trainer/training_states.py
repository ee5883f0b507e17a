"""States of trainings, which tests compare to the last bit."""

import torch

from tests.trainer.tiny_models import config_of
from trainer.build import Training
from trainer.checkpoint.tensors import tensor_shards
from trainer.runtime.ranks import join_ranks


def state_of_training(training: Training) -> dict[str, torch.Tensor]:
    """Return a copy of the weights and of the optimizer's state, by name."""
    ranks = join_ranks(config_of(), environment={})
    return {shard.name: shard.local.clone() for shard in tensor_shards(training, ranks)}


def tensors_are_equal(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> bool:
    """Return whether both have the same names, and equal tensors to the last bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
