"""Building of encoders: presets, configs that are rejected, and parts of a model."""

import pytest
import torch

from trainer.formats.errors import BadConfig
from trainer.formats.manifest import SpecialIds
from trainer.formats.presets import PRESETS, model_settings
from trainer.formats.train_config import ModelSettings
from trainer.model.encoder import build_model, model_head, model_layers
from trainer.model.encoder_config import build_config

SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
FAMILIES = ["bert", "modernbert", "esm", "eurobert", "distilbert"]
"""Architectures whose modules have different names."""
PRESET_VOCAB_SIZE = 22_001
PADDED_VOCAB_SIZE = 22_016
"""``PRESET_VOCAB_SIZE``, rounded up to a multiple of 64."""


def config_of(settings: ModelSettings, *, seq_length_tokens=64, vocab_size=1000):
    """Return the transformers config of a model."""
    return build_config(
        settings,
        vocab_size=vocab_size,
        special_ids=SPECIAL_IDS,
        seq_length_tokens=seq_length_tokens,
    )


def small_config(model_type: str, *, layers=1):
    """Return the transformers config of a small model."""
    shape = {
        "model_type": model_type,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
    }
    return config_of(ModelSettings(name="x", config=shape))


def preset_model(name: str):
    """Return the model of a preset, without memory for its parameters."""
    config = config_of(model_settings(name), vocab_size=PRESET_VOCAB_SIZE)
    return build_model(config, torch.device("meta"))


@pytest.mark.parametrize("name", PRESETS)
class TestPreset:
    def test_is_built_for_training(self, name):
        model = preset_model(name)
        assert model.training
        # Transformers has no public name for it.
        assert model.config._attn_implementation == "sdpa"
        assert sum(parameter.numel() for parameter in model.parameters()) > 0

    def test_has_embedding_of_whole_tiles(self, name):
        model = preset_model(name)
        rows, _width = model.get_output_embeddings().weight.shape
        assert rows == PADDED_VOCAB_SIZE


@pytest.mark.parametrize(
    ("name", "min_millions", "max_millions"),
    # The number of parameters also depends on the vocabulary.
    [("bert-120m", 100, 125), ("bert-350m", 320, 355)],
)
def test_preset_has_size_in_its_name(name, min_millions, max_millions):
    model = preset_model(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert min_millions < parameters / 1e6 < max_millions


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"model_type": "bert", "is_decoder": True}, id="decoder"),
        pytest.param({"model_type": "bart"}, id="encoder-decoder"),
    ],
)
def test_rejects_model_that_is_no_encoder(shape):
    with pytest.raises(BadConfig, match="not an encoder"):
        config_of(ModelSettings(name="x", config=shape))


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param("gpt2", id="only causal"),
        pytest.param("bertt", id="misspelt type"),
    ],
)
def test_rejects_type_without_masked_lm(model_type):
    with pytest.raises(BadConfig, match=f"no masked-LM model of type '{model_type}'"):
        config_of(ModelSettings(name="x", config={"model_type": model_type}))


def test_rejects_value_that_transformers_rejects():
    shape = {"model_type": "modernbert", "num_hidden_layers": "many"}
    with pytest.raises(BadConfig, match="transformers rejects the config"):
        config_of(ModelSettings(name="x", config=shape))


@pytest.mark.parametrize(
    ("model_type", "max_tokens"),
    # RoBERTa's positions begin after that of padding.
    [("bert", 128), ("roberta", 127)],
)
def test_sequences_may_fill_all_positions(model_type, max_tokens):
    settings = ModelSettings(
        name="x", config={"model_type": model_type, "max_position_embeddings": 128}
    )
    config = config_of(settings, seq_length_tokens=max_tokens)
    assert config.max_position_embeddings == 128
    with pytest.raises(
        BadConfig,
        match=f"sequence length {max_tokens + 1} exceeds the {max_tokens} positions",
    ):
        config_of(settings, seq_length_tokens=max_tokens + 1)


def frozen_parameters(model) -> set[str]:
    return {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "distilbert", "electra", "mpnet"]
)
def test_model_whose_loss_uses_all_parameters_freezes_none(model_type):
    model = build_model(small_config(model_type), torch.device("cpu"))
    assert not frozen_parameters(model)


def test_freezes_head_without_influence_on_loss():
    model = build_model(small_config("esm"), torch.device("cpu"))
    frozen = frozen_parameters(model)
    assert frozen
    assert all("contact_head" in name for name in frozen)


@pytest.mark.parametrize("model_type", ["bert", "esm"])
def test_new_model_has_no_gradients(model_type):
    # A forward and backward pass has found the parameters without influence.
    model = build_model(small_config(model_type), torch.device("cpu"))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_config_has_special_ids_of_dataset():
    config = small_config("bert")
    assert config.pad_token_id == SPECIAL_IDS.pad
    assert config.mask_token_id == SPECIAL_IDS.mask


@pytest.mark.parametrize("model_type", FAMILIES)
def test_encoder_and_head_have_all_parameters(model_type):
    model = build_model(small_config(model_type), torch.device("meta"))
    parameters = set(model.base_model.parameters())
    for part in model_head(model):
        parameters.update(part.parameters())
    assert parameters == set(model.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_finds_layers(model_type):
    model = build_model(small_config(model_type, layers=3), torch.device("meta"))
    assert len(model_layers(model)) == 3
