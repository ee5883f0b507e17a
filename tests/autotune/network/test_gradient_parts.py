"""Gradients of a model, and when they become ready."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.network.gradient_parts import gradient_parts
from trainer.formats.train_config import ModelSettings, TrainConfig

LAYERS = st.integers(1, 48)
PARAMETERS = st.integers(10**5, 10**10)


def _bert_with_layers(layers: int) -> TrainConfig:
    shape = {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": 256,
        "intermediate_size": 1024,
    }
    return TrainConfig(model=ModelSettings(name="m", config=shape))


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
