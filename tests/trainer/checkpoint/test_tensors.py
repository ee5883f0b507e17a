import pytest
import torch

from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.checkpoint.tensors import tensor_shards
from trainer.runtime.ranks import join_ranks

LEARNING_RATE = 1e-3


@pytest.fixture
def trained(dataset):
    """A training of one rank after a step, so that it has optimizer state."""
    config = config_of()
    training = training_of(config, dataset)
    training.step.run(micro_batches(dataset, config), LEARNING_RATE)
    return training


@pytest.fixture
def shards(trained):
    return tensor_shards(trained, join_ranks(config_of(), environment={}))


def test_tied_weights_are_listed_once(trained, shards):
    embeddings = trained.module.model.get_input_embeddings().weight
    output = trained.module.model.get_output_embeddings().weight
    assert output is embeddings
    addresses = [
        shard.local.data_ptr() for shard in shards if shard.name.startswith("weights.")
    ]
    assert embeddings.data_ptr() in addresses
    assert len(set(addresses)) == len(addresses)


def test_every_parameter_has_optimizer_state(trained, shards):
    names = {shard.name for shard in shards}
    for name, _ in trained.module.named_parameters():
        assert {f"{kind}.{name}" for kind in ("step", "exp_avg", "exp_avg_sq")} <= names


def test_single_rank_saves_whole_tensors(shards):
    for shard in shards:
        assert shard.saved_here
        assert (shard.begin, shard.shape) == (0, tuple(shard.local.shape))


def test_shards_share_memory_with_the_training(trained, shards):
    name, parameter = next(iter(trained.module.named_parameters()))
    (shard,) = [shard for shard in shards if shard.name == f"weights.{name}"]
    with torch.no_grad():
        shard.local.fill_(2.0)
    assert bool((parameter == 2).all())
