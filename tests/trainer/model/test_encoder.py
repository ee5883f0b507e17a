import pytest
import torch

from trainer.config.presets import PRESETS, model_settings
from trainer.config.train_config import ModelSettings
from trainer.data.manifest import SpecialIds
from trainer.errors import BadConfig
from trainer.model.encoder import build_config, build_model

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
def test_builds_every_preset(name):
    model = _preset_model(name)
    # 22,001 ids in whole tiles of 64.
    assert model.get_output_embeddings().weight.shape[0] == 22_016
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


@pytest.mark.parametrize(
    ("name", "least_millions", "most_millions"),
    [("bert-120m", 100, 125), ("bert-350m", 320, 355)],
)
def test_preset_has_size_in_its_name(name, least_millions, most_millions):
    model = _preset_model(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert least_millions < parameters / 1e6 < most_millions


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


@pytest.mark.parametrize(
    ("model_type", "unused_heads"),
    [
        ("esm", {"contact_head"}),
        ("bert", set()),
        ("roberta", set()),
        ("distilbert", set()),
        ("electra", set()),
        ("mpnet", set()),
    ],
)
def test_freezes_parameters_without_influence_on_loss(model_type, unused_heads):
    model = build_model(_config(_small(model_type)), torch.device("cpu"))
    frozen = {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    frozen_parts: set[str] = set()
    for name in frozen:
        frozen_parts.update(name.split("."))
    frozen_heads = {part for part in frozen_parts if part.endswith("_head")}
    assert frozen_heads == unused_heads
    assert bool(frozen) == bool(unused_heads)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config.pad_token_id == 0
