"""Activation checkpointing saves memory and changes no result."""

import pytest
import torch

from tests.trainer.gradients import (
    assert_gradients_agree,
    loss_and_gradients_of_first_step,
)
from tests.trainer.tiny_models import SHAPES, config_of, micro_batches, training_of
from trainer.activation_checkpointing import checkpoint_activations
from trainer.data.dataset import TokenDataset
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import ModelSettings, TrainConfig

BERT_WITH_DROPOUT = SHAPES["bert"] | {
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.2,
}
"""Shape whose layers must draw the same numbers when they are computed again."""


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SHAPES["bert"], id="bert"),
        pytest.param(SHAPES["roberta"], id="roberta"),
        pytest.param(SHAPES["modernbert"], id="modernbert"),
        pytest.param(BERT_WITH_DROPOUT, id="bert with dropout"),
    ],
)
@pytest.mark.parametrize("activation_checkpointing", ["selective", "full"])
def test_checkpointing_changes_neither_loss_nor_gradient(
    shape, activation_checkpointing, dataset
):
    config = config_of(model=ModelSettings(name="m", config=shape))
    checkpointed = config.model_copy(
        update={"activation_checkpointing": activation_checkpointing}
    )
    # The forward pass is the same, to the last bit of fp32.
    assert_gradients_agree(
        loss_and_gradients_of_first_step(checkpointed, dataset),
        loss_and_gradients_of_first_step(config, dataset),
        loss=1e-7,
    )


def _saved_bytes(config: TrainConfig, dataset: TokenDataset) -> int:
    """Return the bytes of all tensors that a step saves for backward.

    Selective checkpointing also keeps tensors in its own cache, which is not
    counted.
    """
    training = training_of(config, dataset)
    storage_bytes: dict[int, int] = {}

    def count_storage(tensor):
        # By its address, as several tensors may be views of one storage.
        storage = tensor.untyped_storage()
        storage_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count_storage, _unchanged):
        loss = training.module(*micro_batches(dataset, config))
    loss.backward()
    return sum(storage_bytes.values())


def _unchanged(tensor):
    return tensor


@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
@pytest.mark.parametrize("activation_checkpointing", ["selective", "full"])
def test_checkpointing_saves_memory(last_layer, activation_checkpointing, dataset):
    config = config_of(last_layer=last_layer)
    checkpointed = config.model_copy(
        update={"activation_checkpointing": activation_checkpointing}
    )
    assert _saved_bytes(checkpointed, dataset) < _saved_bytes(config, dataset)


@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
def test_rejects_checkpointing_that_model_does_not_support(last_layer, dataset):
    config = config_of(activation_checkpointing="full", last_layer=last_layer)
    training = training_of(config, dataset)
    training.module.model.supports_gradient_checkpointing = False
    with pytest.raises(BadConfig, match="no activation checkpointing"):
        checkpoint_activations(training.module.model, config)
