import pytest
import torch

from trainer.config.presets import PRESETS, model_settings
from trainer.config.train_config import ModelSettings
from trainer.data.manifest import SpecialIds
from trainer.errors import BadConfig
from trainer.model.encoder import (
    build_config,
    build_model,
    model_head,
    model_layers,
)

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def _config(settings: ModelSettings, seq_length: int = 64, vocab_size: int = 1000):
    return build_config(
        settings, vocab_size=vocab_size, special_ids=IDS, seq_length_tokens=seq_length
    )


def _small(model_type: str, layers: int = 1) -> ModelSettings:
    shape = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
    }
    return ModelSettings(name="x", config=shape | {"model_type": model_type})


def _preset_model(name: str):
    config = _config(model_settings(name), vocab_size=22_001)
    return build_model(config, torch.device("meta"))


@pytest.mark.parametrize("name", PRESETS)
class TestPreset:
    def test_is_built_for_training(self, name):
        model = _preset_model(name)
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert sum(parameter.numel() for parameter in model.parameters()) > 0

    def test_has_embedding_of_whole_tiles(self, name):
        # 22,001 ids, rounded up to a multiple of 64.
        model = _preset_model(name)
        assert model.get_output_embeddings().weight.shape[0] == 22_016


@pytest.mark.parametrize(
    ("name", "min_millions", "max_millions"),
    # The number depends on the vocabulary, here of 22,001 ids.
    [("bert-120m", 100, 125), ("bert-350m", 320, 355)],
)
def test_preset_has_size_in_its_name(name, min_millions, max_millions):
    model = _preset_model(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert min_millions < parameters / 1e6 < max_millions


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        pytest.param(
            {"model_type": "bert", "is_decoder": True}, "not an encoder", id="decoder"
        ),
        pytest.param({"model_type": "bart"}, "not an encoder", id="encoder-decoder"),
        pytest.param(
            {"model_type": "gpt2"},
            "no masked-LM model of type 'gpt2'",
            id="no masked LM",
        ),
        pytest.param(
            {"model_type": "bertt"},
            "no masked-LM model of type 'bertt'",
            id="misspelt type",
        ),
        pytest.param(
            {"model_type": "modernbert", "num_hidden_layers": "many"},
            "transformers rejects the config",
            id="wrong value",
        ),
    ],
)
def test_rejects_model_that_is_no_encoder(shape, reason):
    with pytest.raises(BadConfig, match=reason):
        _config(ModelSettings(name="x", config=shape))


@pytest.mark.parametrize(("model_type", "positions"), [("bert", 128), ("roberta", 127)])
def test_sequences_may_fill_all_positions(model_type, positions):
    settings = ModelSettings(
        name="x", config={"model_type": model_type, "max_position_embeddings": 128}
    )
    assert _config(settings, positions).max_position_embeddings == 128
    with pytest.raises(
        BadConfig,
        match=f"sequence length {positions + 1} exceeds the {positions} positions",
    ):
        _config(settings, positions + 1)


def _frozen_parameters(model) -> set[str]:
    return {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "distilbert", "electra", "mpnet"]
)
def test_model_whose_loss_uses_all_parameters_freezes_none(model_type):
    model = build_model(_config(_small(model_type)), torch.device("cpu"))
    assert not _frozen_parameters(model)


def test_freezes_head_without_influence_on_loss():
    model = build_model(_config(_small("esm")), torch.device("cpu"))
    frozen = _frozen_parameters(model)
    assert frozen
    assert all("contact_head" in name for name in frozen)


@pytest.mark.parametrize("model_type", ["bert", "esm"])
def test_new_model_has_no_gradients(model_type):
    # A forward and backward pass has found the parameters without influence.
    model = build_model(_config(_small(model_type)), torch.device("cpu"))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_config_has_special_ids_of_dataset():
    config = _config(_small("bert"))
    assert config.pad_token_id == IDS.pad
    assert config.mask_token_id == IDS.mask


@pytest.mark.parametrize(
    "model_type", ["bert", "modernbert", "esm", "eurobert", "distilbert"]
)
def test_encoder_and_head_have_all_parameters(model_type):
    model = build_model(_config(_small(model_type)), torch.device("meta"))
    parameters = set(model.base_model.parameters())
    for part in model_head(model):
        parameters.update(part.parameters())
    assert parameters == set(model.parameters())


@pytest.mark.parametrize(
    "model_type", ["bert", "modernbert", "esm", "eurobert", "distilbert"]
)
def test_finds_layers(model_type):
    model = build_model(_config(_small(model_type, layers=3)), torch.device("meta"))
    assert len(model_layers(model)) == 3
