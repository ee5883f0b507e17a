"""Steps as consumers of batches: the trainer's, and plain ones."""

import time

import pytest
import torch

from autotune.subjects.mlm.jobs.window_step import TrainerStep
from autotune.subjects.subject import StepFacts
from autotune.workers.jobs.consumers import FedStep
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.data.dataset import TokenDataset

CONFIG = config_of(micro_batch_size=4, global_batch_size=8)
MICRO_BATCHES = 2
"""Micro-batches of an optimizer step by ``CONFIG``."""
CPU = torch.device("cpu")
LOAD_S = 0.02
"""Least time that a loader takes for a batch, by the real clock."""


@pytest.fixture
def dataset(patterned_dataset) -> TokenDataset:
    return TokenDataset.open(patterned_dataset)


@pytest.fixture
def training(dataset):
    return training_of(CONFIG, dataset)


@pytest.fixture
def training_step(training) -> FedStep:
    return FedStep(lambda: TrainerStep(training, CONFIG, MICRO_BATCHES), CPU)


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


def test_trainer_keeps_losses_on_request(training, batches):
    step = TrainerStep(training, CONFIG, MICRO_BATCHES, keeps_losses=True)
    consumer = FedStep(lambda: step, CPU)
    loader = iter(batches)
    consumer.step(loader)
    consumer.step(loader)
    losses = step.autotune_facts.losses()
    assert len(losses) == 2
    assert losses[-1] == step.autotune_facts.loss()


def test_trainer_counts_tokens_of_a_batch(training, batches):
    facts = TrainerStep(training, CONFIG, MICRO_BATCHES).autotune_facts
    work = facts.work(batches[0])
    assert work["units"] == batches[0].non_padding_tokens
    assert work["units"] <= work["padded_units"] == batches[0].ids_BS.numel()
    assert work["model_flops"] > 0


def test_plain_step_gets_each_batch():
    taken = []
    consumer = FedStep(lambda: taken.append, CPU)
    assert consumer.step(iter("ab")) == ["a"]
    assert taken == ["a"]


def test_step_without_parameter_gets_no_batch():
    calls = []
    consumer = FedStep(lambda: lambda: calls.append("called"), CPU)
    assert consumer.step(iter("ab")) == ["a"]
    assert calls == ["called"]


def test_step_gets_as_many_batches_as_it_names():
    taken = []

    def step(batches):
        taken.append(batches)

    step.autotune_facts = StepFacts(micro_batches=2)
    FedStep(lambda: step, CPU).step(iter("abc"))
    assert taken == [["a", "b"]]
