"""Layers whose matmuls round to float8, emulated on a CPU, compared with bf16."""

import pytest

from tests.trainer.gradients import (
    LossAndGradients,
    loss_and_gradients,
    loss_and_gradients_of_first_step,
    relative_distance,
)
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.build import Training
from trainer.formats.train_config import TrainConfig
from trainer.model.float8 import use_float8

pytestmark = pytest.mark.usefixtures("torchao")


def _config(family: str) -> TrainConfig:
    return config_of(family, precision="bf16", max_grad_norm=1.0)


def _float8_training(config: TrainConfig, dataset, recipe) -> Training:
    training = training_of(config, dataset)
    use_float8(training.module.layers, recipe, emulate=True)
    return training


def _layer_gradients(learned: LossAndGradients):
    """Return the gradients of the layers, which alone compute in float8."""
    return {
        name: gradient
        for name, gradient in learned.gradients.items()
        if "layer" in name
    }


@pytest.mark.parametrize(
    ("family", "recipe"), [("bert", "tensorwise"), ("modernbert", "rowwise")]
)
def test_float8_rounds_gradients_of_layers(family, recipe, dataset):
    config = _config(family)
    batches = micro_batches(dataset, config)
    in_bf16 = loss_and_gradients_of_first_step(config, dataset)
    in_float8 = loss_and_gradients(_float8_training(config, dataset, recipe), batches)
    # Rounding errors of single tokens cancel in the loss of all.
    assert in_float8.loss == pytest.approx(in_bf16.loss, rel=1e-3)
    distance = relative_distance(_layer_gradients(in_bf16), _layer_gradients(in_float8))
    # One rounding to float8, which has 3 or 4 significant bits, is up to 2**-3 = 12.5 %
    # of a number. One rounding to bf16 is up to 2**-8 = 0.4 %: below that, nothing was
    # rounded to float8.
    assert 0.005 < distance < 0.1


def _losses(training: Training, batches) -> list[float]:
    """Train for a step on each micro-batch, and return the losses."""
    learning_rate = 3e-3
    return [float(training.step.run([batch], learning_rate).loss) for batch in batches]


def test_float8_learns_as_bf16_does(dataset):
    # One family only, as emulation is slow.
    config = _config("bert")
    batches = micro_batches(dataset, config, steps=10)
    in_bf16 = _losses(training_of(config, dataset), batches)
    in_float8 = _losses(_float8_training(config, dataset, "tensorwise"), batches)
    # The loss falls by more than 5 %, so 1 % tells it from one that does not fall.
    assert in_float8[-1] < 0.95 * in_float8[0]
    assert in_float8[-1] == pytest.approx(in_bf16[-1], rel=0.01)
