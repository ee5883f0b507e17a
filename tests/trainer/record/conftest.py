"""Training and micro-batches that tests of the meter share."""

import pytest

from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.build import Training
from trainer.data.dataset import TokenDataset
from trainer.data.micro_batch import MicroBatch
from trainer.formats.train_config import TrainConfig


@pytest.fixture(scope="module")
def two_part_config() -> TrainConfig:
    """Configuration of a step of two micro-batches, of four sequences each."""
    return config_of(micro_batch_size=4, global_batch_size=8)


@pytest.fixture(scope="module")
def training(patterned_dataset, two_part_config) -> Training:
    """A training that tests share, so that they must not change its weights."""
    return training_of(two_part_config, TokenDataset.open(patterned_dataset))


@pytest.fixture(scope="module")
def batches(patterned_dataset, two_part_config) -> list[MicroBatch]:
    """Micro-batches of the first eight steps."""
    dataset = TokenDataset.open(patterned_dataset)
    return micro_batches(dataset, two_part_config, steps=8)
