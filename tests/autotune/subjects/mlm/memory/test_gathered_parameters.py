"""Parameters that fsdp2 gathers at once."""

import pytest

from autotune.subjects.mlm.memory.gathered_parameters import largest_gather_bytes
from trainer.formats.presets import PRESETS
from trainer.formats.train_config import ModelSettings, TrainConfig

FP32_BYTES = 4
BERT_LAYERS = 12
# Query, key, value and output of attention, and both matrices of the MLP.
BERT_LAYER_WEIGHTS = 4 * 768**2 + 2 * 768 * 3072


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
    bert = TrainConfig(
        model=ModelSettings(name="bert-120m", config=PRESETS["bert-120m"])
    )
    parameters = BERT_LAYERS * BERT_LAYER_WEIGHTS + outside_layers
    assert largest_gather_bytes(bert, parameters) == FP32_BYTES * gathered
