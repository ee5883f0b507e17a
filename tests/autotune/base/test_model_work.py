"""The work that a config tells in advance matches that of the built model.

Models are built on the meta device, so their weights take no memory.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.model_work import (
    estimate_vocab_size,
    expected_model_work,
    gradient_parts,
    largest_gather_bytes,
)
from trainer.config.presets import PRESETS
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.data.manifest import SpecialIds
from trainer.matmul_weights import model_work
from trainer.model.encoder import build_model
from trainer.model.encoder_config import build_config
from trainer.model.flops import ModelWork

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
VOCAB_SIZE = 5000
PADDED_VOCAB_SIZE = 5056
"""``VOCAB_SIZE`` rounded up to a multiple of 64, as the trainer pads the table."""
FP32_BYTES = 4
BERT_LAYERS = 12
# Query, key, value and output of attention, and both matrices of the MLP.
BERT_LAYER_WEIGHTS = 4 * 768**2 + 2 * 768 * 3072
TWO_LAYERS = PRESETS["modernbert-base"] | {
    "num_hidden_layers": 2,
    "local_attention": 64,
}
# Unlike the presets, these end with a layer of sliding attention, which the trainer
# never makes sparse.
LAST_LAYER_SLIDING = {
    "full, then sliding attention": TWO_LAYERS
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "sliding attention only": TWO_LAYERS
    | {"layer_types": ["sliding_attention", "sliding_attention"]},
}
SHAPES = PRESETS | LAST_LAYER_SLIDING
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def _train_config(shape) -> TrainConfig:
    return TrainConfig(model=ModelSettings(name="m", config=shape))


def _built_model_work(train: TrainConfig) -> ModelWork:
    config = build_config(
        train.model, vocab_size=VOCAB_SIZE, special_ids=IDS, seq_length_tokens=512
    )
    return model_work(build_model(config, torch.device("meta")))


@every_shape
def test_expects_work_of_built_model(shape):
    train = _train_config(shape)
    built = _built_model_work(train)
    assert expected_model_work(train, VOCAB_SIZE, built.parameters) == built


@every_shape
def test_estimates_vocabulary_from_parameters(shape):
    train = _train_config(shape)
    built = _built_model_work(train)
    # Weights of norms are taken for vectors of the table: up to 1.2 % of this small
    # vocabulary, in ModernBERT, which has the most norms.
    assert estimate_vocab_size(train, built.parameters) == pytest.approx(
        PADDED_VOCAB_SIZE, rel=0.012
    )


LAYERS = st.integers(1, 48)
PARAMETERS = st.integers(10**5, 10**10)


def _bert_with_layers(layers: int) -> TrainConfig:
    shape = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": 256,
        "intermediate_size": 1024,
    }
    return _train_config(shape)


@given(LAYERS, PARAMETERS)
def test_gradients_have_all_parameters(layers, parameters):
    parts = gradient_parts(_bert_with_layers(layers), parameters)
    # The layers' elements are divided into 4 * layers equal parts, and the remainder,
    # which is less than that number, is left out.
    assert sum(part.elements for part in parts) == pytest.approx(
        parameters, rel=0, abs=4 * layers
    )


@given(LAYERS, PARAMETERS)
def test_gradients_are_in_order_of_readiness(layers, parameters):
    parts = gradient_parts(_bert_with_layers(layers), parameters)
    ready_shares = [part.ready_share for part in parts]
    assert ready_shares == sorted(ready_shares)
    assert ready_shares[-1] == 1.0


def test_unknown_architecture_has_no_work():
    unknown = _train_config({"model_type": "esm"})
    assert expected_model_work(unknown, 100, 1000) is None
    assert estimate_vocab_size(unknown, 1000) is None


@pytest.mark.parametrize(
    ("outside_layers", "gathered"),
    [
        pytest.param(1000, BERT_LAYER_WEIGHTS, id="a layer"),
        pytest.param(
            8 * BERT_LAYER_WEIGHTS, 8 * BERT_LAYER_WEIGHTS, id="the embedding table"
        ),
    ],
)
def test_gathers_layer_or_embedding_if_larger(outside_layers, gathered):
    bert = _train_config(PRESETS["bert-120m"])
    parameters = BERT_LAYERS * BERT_LAYER_WEIGHTS + outside_layers
    assert largest_gather_bytes(bert, parameters) == FP32_BYTES * gathered
