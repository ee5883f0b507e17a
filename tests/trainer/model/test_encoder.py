import itertools
import json

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
    # Whole tiles of 64 ids.
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
        ({"model_type": "bert", "is_decoder": True}, "not an encoder"),
        ({"model_type": "bart"}, "not an encoder"),
        ({"model_type": "gpt2"}, "no masked-LM model of type 'gpt2'"),
        ({"model_type": "bertt"}, "no masked-LM model of type 'bertt'"),
        (
            {"model_type": "modernbert", "num_hidden_layers": "many"},
            "transformers rejects the config",
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


def test_config_file_gives_shape(tmp_path):
    path = tmp_path / "my-encoder" / "config.json"
    path.parent.mkdir()
    shape = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}
    other_keys = {
        "vocab_size": 7,
        "classifier_dropout": None,
        "architectures": ["BertForMaskedLM"],
        "_name_or_path": "x",
    }
    path.write_text(json.dumps(shape | other_keys))
    settings = model_settings(str(path))
    assert settings.name == "my-encoder"
    assert settings.config == shape
    assert settings.null_keys == ["classifier_dropout"]
    assert model_settings(str(path.parent)) == settings


def test_profile_gives_shape(tmp_path):
    profile = tmp_path / "profile.toml"
    profile.write_text(
        '[train.model]\nname = "my-encoder"\nnull_keys = ["classifier_dropout"]\n'
        '[train.model.config]\nmodel_type = "bert"\nhidden_size = 64\n'
    )
    assert model_settings(str(profile)) == ModelSettings(
        name="my-encoder",
        config={"model_type": "bert", "hidden_size": 64},
        null_keys=["classifier_dropout"],
    )
    profile.write_text("seed = 1\n")
    with pytest.raises(BadConfig, match=r"train\.model"):
        model_settings(str(profile))


def test_rejects_config_with_its_own_code(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "evil--code"}})
    )
    with pytest.raises(BadConfig, match="auto_map"):
        model_settings(str(path))


def test_suggests_preset_for_misspelt_name():
    with pytest.raises(BadConfig) as caught:
        model_settings("bert-120")
    assert "'bert-120m'" in caught.value.next_step


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("a|<script>", "a-script"),
        ("..x", "x"),
        ("ünïcode name", "n-code-name"),
        ("-rf", "rf"),
    ],
)
def test_name_of_directory_becomes_plain(tmp_path, directory, name):
    path = tmp_path / directory / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "bert"}))
    assert model_settings(str(path)).name == name


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", ""])
def test_rejects_name_that_leads_elsewhere(name):
    with pytest.raises(ValueError, match="name"):
        ModelSettings(name=name, config={"model_type": "bert"})


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
    parts = itertools.chain.from_iterable(name.split(".") for name in frozen)
    assert {part for part in parts if part.endswith("_head")} == unused_heads
    assert bool(frozen) == bool(unused_heads)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config.pad_token_id == 0
