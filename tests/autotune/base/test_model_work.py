import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.base import model_work as shapes
from autotune.base.model_work import (
    estimate_vocab_size,
    expected_model_work,
    largest_gather_bytes,
)
from trainer.build import model_work
from trainer.config.presets import PRESETS
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.data.dataset import SpecialIds
from trainer.model.encoder import build_config, build_model

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
VOCAB_SIZE = 5000
MODERNBERT = PRESETS["modernbert-base"] | {
    "num_hidden_layers": 2,
    "local_attention": 64,
}
BERT = TrainConfig(model=ModelSettings(name="m", config=PRESETS["bert-120m"]))


KINDS = ("full_attention", "sliding_attention")
SLIDING = [
    MODERNBERT | {"layer_types": [first, "sliding_attention"]} for first in KINDS
]


@pytest.mark.parametrize(
    "shape",
    [*PRESETS.values(), *SLIDING],
    ids=[*PRESETS, "one layer of two", "no layer of full attention"],
)
def test_what_a_shape_computes_is_what_the_built_model_does(shape):
    train = TrainConfig(model=ModelSettings(name="m", config=shape))
    config = build_config(
        train.model, vocab_size=VOCAB_SIZE, special_ids=IDS, seq_length_tokens=512
    )
    truth = model_work(build_model(config, torch.device("meta")))
    assert expected_model_work(train, VOCAB_SIZE, truth.parameters) == truth
    assert estimate_vocab_size(train, truth.parameters) == pytest.approx(
        -(-VOCAB_SIZE // 64) * 64, rel=0.02
    )


@given(st.integers(1, 48), st.integers(10**5, 10**10))
def test_gradients_add_up_and_the_last_are_everything_else(layers, parameters):
    config = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": 256,
        "intermediate_size": 1024,
    }
    parts = shapes.gradient_parts(
        TrainConfig(model=ModelSettings(name="m", config=config)), parameters
    )
    assert sum(part.elements for part in parts) == pytest.approx(
        parameters, rel=0.01, abs=5 * layers
    )
    readiness = [part.ready_share for part in parts]
    assert readiness == sorted(readiness)
    assert readiness[-1] == 1.0


def test_the_largest_unit_is_the_table_or_a_layer_and_an_architecture_without_known_parts_has_no_count():
    unknown = TrainConfig(model=ModelSettings(name="m", config={"model_type": "esm"}))
    assert (
        expected_model_work(unknown, 100, 1000)
        is estimate_vocab_size(unknown, 1000)
        is None
    )
    of_layer = 4 * 768**2 + 2 * 768 * 3072
    assert largest_gather_bytes(BERT, 12 * of_layer + 1000) == 4 * of_layer
    assert largest_gather_bytes(BERT, 20 * of_layer) == 4 * 8 * of_layer
