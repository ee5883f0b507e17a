"""The work that a config tells in advance matches that of the built model.

Models are built on the meta device, so their weights take no memory.
"""

import pytest
import torch

from autotune.subjects.mlm.model_work import (
    estimate_vocab_size,
    position_share,
)
from trainer.formats.encoder_shape import encoder_shape
from trainer.formats.manifest import SpecialIds
from trainer.formats.presets import PRESETS
from trainer.formats.train_config import ModelSettings, TrainConfig
from trainer.matmul_weights import model_work
from trainer.model.encoder import build_model
from trainer.model.encoder_config import build_config
from trainer.model.flops import ModelWork

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
VOCAB_SIZE = 5000
PADDED_VOCAB_SIZE = 5056
"""``VOCAB_SIZE`` rounded up to a multiple of 64, as the trainer pads the table."""
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
    expected = encoder_shape(train)
    assert expected.weights_per_token == built.weights_per_token
    assert expected.reaches == built.reaches
    assert expected.can_have_sparse_last_layer == built.last_layer_narrow


@every_shape
def test_estimates_vocabulary_from_parameters(shape):
    train = _train_config(shape)
    built = _built_model_work(train)
    # Weights of norms are taken for vectors of the table: up to 1.2 % of this small
    # vocabulary, in ModernBERT, which has the most norms.
    assert estimate_vocab_size(train, built.parameters) == pytest.approx(
        PADDED_VOCAB_SIZE, rel=0.012
    )


def test_unknown_architecture_has_no_work():
    unknown = _train_config({"model_type": "esm"})
    assert encoder_shape(unknown).layout is None
    assert estimate_vocab_size(unknown, 1000) is None


@every_shape
def test_position_share_is_that_of_built_model(shape):
    train = _train_config(shape).model_copy(
        update={"mlm_head": "sparse", "last_layer": "sparse"}
    )
    built = _built_model_work(train)
    predicted_work = train.masking_probability * built.weights_per_predicted_token
    share = built.weights_per_token / (built.weights_per_token + predicted_work)
    # Positions are taken for vectors of the table, with which only masked tokens are
    # multiplied: bert-mini has a tenth as many of them as of this small vocabulary,
    # which changes the share by 1.2 %.
    assert position_share(train, built.parameters) == pytest.approx(share, rel=0.013)


def test_dense_head_leaves_no_work_to_masked_tokens():
    train = _train_config(PRESETS["bert-120m"]).model_copy(update={"mlm_head": "dense"})
    assert position_share(train, 10**8) == 1
