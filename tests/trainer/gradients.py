"""Loss and gradients of a step, and their comparison with those of another."""

from typing import NamedTuple

import pytest
import torch

from tests.trainer.tiny_models import micro_batches, training_of
from trainer.build import Training
from trainer.data.dataset import TokenDataset
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.formats.train_config import TrainConfig

FP32_ROUNDING = 1e-6
"""Relative error of fp32 sums in another order: about ten times the smallest step of
fp32, which is 1.2e-7."""


class LossAndGradients(NamedTuple):
    """Loss of a step, and the gradient of each parameter by name."""

    loss: float
    gradients: dict[str, torch.Tensor]


def loss_and_gradients(
    training: Training, batches: list[MicroBatch]
) -> LossAndGradients:
    """Take one step at a learning rate of 0, and return its loss and gradients.

    The gradients are clipped: the optimizer divides them by its ``grad_scale``.
    """
    gradients: dict[str, torch.Tensor] = {}

    def record_gradients(*_):
        divisor = unwrap_optimizer(training.optimizer).grad_scale
        for name, parameter in training.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad / divisor

    handle = training.optimizer.register_step_pre_hook(record_gradients)
    result = training.step.run(batches, lr=0.0)
    handle.remove()
    return LossAndGradients(loss=float(result.loss), gradients=gradients)


def loss_and_gradients_of_first_step(
    config: TrainConfig, dataset: TokenDataset
) -> LossAndGradients:
    """Return loss and gradients of the first step of a new training."""
    training = training_of(config, dataset)
    return loss_and_gradients(training, micro_batches(dataset, config))


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    """Return the L2 norm of a whole gradient."""
    squares = (float((gradient.double() ** 2).sum()) for gradient in gradients.values())
    return sum(squares) ** 0.5


def relative_distance(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> float:
    """Return the L2 distance of two whole gradients over the norm of the first."""
    assert first.keys() == second.keys()
    differences = {name: first[name] - second[name] for name in first}
    return norm_of(differences) / norm_of(first)


def assert_gradients_agree(
    actual: LossAndGradients,
    expected: LossAndGradients,
    *,
    loss: float = FP32_ROUNDING,
    gradient: float = FP32_ROUNDING,
) -> None:
    """Assert that losses and whole gradients agree.

    Args:
        actual: Loss and gradients of the tested step.
        expected: Those of a plain one.
        loss: Largest relative difference of the losses.
        gradient: Largest relative distance of the gradients.
    """
    assert actual.loss == pytest.approx(expected.loss, rel=loss)
    assert relative_distance(expected.gradients, actual.gradients) < gradient
