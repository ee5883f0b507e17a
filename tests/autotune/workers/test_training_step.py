"""The trainer's step as a consumer of batches."""

import time

import pytest
import torch

from autotune.workers.jobs.consumers import TrainingStep
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.data.dataset import TokenDataset

CONFIG = config_of(micro_batch_size=4, global_batch_size=8)
MICRO_BATCHES = 2
"""Micro-batches of an optimizer step by ``CONFIG``."""
LOAD_S = 0.02
"""Least time that a loader takes for a batch, by the real clock."""


@pytest.fixture
def dataset(patterned_dataset) -> TokenDataset:
    return TokenDataset.open(patterned_dataset)


@pytest.fixture
def training(dataset):
    return training_of(CONFIG, dataset)


@pytest.fixture
def training_step(training) -> TrainingStep:
    return TrainingStep(training, CONFIG, MICRO_BATCHES, torch.device("cpu"))


@pytest.fixture
def batches(dataset):
    """Return the micro-batches of two optimizer steps."""
    return micro_batches(dataset, CONFIG, steps=2)


def test_training_step_changes_the_model(training, training_step, batches):
    before = [parameter.detach().clone() for parameter in training.module.parameters()]
    training_step.step(iter(batches))
    training_step.finish()
    after = training.module.parameters()
    assert any(
        not torch.equal(old, new) for old, new in zip(before, after, strict=True)
    )


def test_training_step_returns_its_micro_batches(training_step, batches):
    loader = iter(batches)
    returned = training_step.step(loader) + training_step.step(loader)
    for returned_batch, batch in zip(returned, batches, strict=True):
        assert returned_batch is batch


def test_training_step_times_the_wait_for_data(training_step, batches):
    def load_slowly():
        for batch in batches:
            time.sleep(LOAD_S)
            yield batch

    training_step.step(load_slowly())
    # A sleep may end late, but never early.
    assert training_step.wait.take_waited_s() >= MICRO_BATCHES * LOAD_S


def test_training_step_rejects_a_loss_of_nan(training, training_step, batches):
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.fill_(float("nan"))
    training_step.step(iter(batches))
    with pytest.raises(ValueError, match="the loss is nan"):
        training_step.finish()
