"""The work of an architecture matches that of the built model."""

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
from trainer.model.encoder import build_config, build_model
from trainer.model.flops import ModelWork

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
VOCAB_SIZE = 5000
MODERNBERT = PRESETS["modernbert-base"] | {
    "num_hidden_layers": 2,
    "local_attention": 64,
}
BERT_LAYER_WEIGHTS = 4 * 768**2 + 2 * 768 * 3072
LAST_LAYER_SLIDING = {
    "one layer of full attention": ["full_attention", "sliding_attention"],
    "no layer of full attention": ["sliding_attention", "sliding_attention"],
}
SHAPES = PRESETS | {
    name: MODERNBERT | {"layer_types": kinds}
    for name, kinds in LAST_LAYER_SLIDING.items()
}
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
    padded_vocab_size = -(-VOCAB_SIZE // 64) * 64
    assert estimate_vocab_size(train, built.parameters) == pytest.approx(
        padded_vocab_size, rel=0.02
    )


@given(st.integers(1, 48), st.integers(10**5, 10**10))
def test_gradients_add_up_in_order(layers, parameters):
    shape = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": 256,
        "intermediate_size": 1024,
    }
    parts = gradient_parts(_train_config(shape), parameters)
    assert sum(part.elements for part in parts) == pytest.approx(
        parameters, rel=0.01, abs=5 * layers
    )
    readiness = [part.ready_share for part in parts]
    assert readiness == sorted(readiness)
    assert readiness[-1] == 1.0


def test_unknown_architecture_has_no_work():
    unknown = _train_config({"model_type": "esm"})
    assert expected_model_work(unknown, 100, 1000) is None
    assert estimate_vocab_size(unknown, 1000) is None


@pytest.mark.parametrize(
    ("other_weights", "gathered_weights"),
    [
        pytest.param(1000, BERT_LAYER_WEIGHTS, id="a layer"),
        pytest.param(
            8 * BERT_LAYER_WEIGHTS, 8 * BERT_LAYER_WEIGHTS, id="the embedding table"
        ),
    ],
)
def test_largest_gather_is_in_fp32(other_weights, gathered_weights):
    bert = _train_config(PRESETS["bert-120m"])
    parameters = 12 * BERT_LAYER_WEIGHTS + other_weights
    assert largest_gather_bytes(bert, parameters) == 4 * gathered_weights
