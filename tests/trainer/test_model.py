import json

import pytest
import torch

from trainer.config import ModelSettings
from trainer.dataset import SpecialIds
from trainer.errors import BadConfig
from trainer.model import build_config, build_model
from trainer.presets import PRESETS, model_settings

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def _config(settings: ModelSettings, seq_length: int = 64, vocab_size: int = 1000):
    return build_config(settings, vocab_size=vocab_size, special_ids=IDS, seq_length_tokens=seq_length)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_with_a_vocabulary_of_whole_tiles(name):
    model = build_model(_config(model_settings(name)), torch.device("meta"))
    assert model.get_output_embeddings().weight.shape[0] == 1024
    assert model.config._attn_implementation == "sdpa"
    assert model.training


@pytest.mark.parametrize(("name", "millions"), [("bert-120m", (100, 125)), ("bert-350m", (320, 355))])
def test_presets_have_about_the_size_in_their_name(name, millions):
    model = build_model(_config(model_settings(name), vocab_size=22_016), torch.device("meta"))
    assert millions[0] < sum(parameter.numel() for parameter in model.parameters()) / 1e6 < millions[1]


@pytest.mark.parametrize("model_type", ["roberta", "distilbert", "electra", "esm", "mpnet"])
def test_other_encoders_build_from_their_type_alone(model_type):
    shape = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = build_model(_config(ModelSettings(name="x", config=shape)), torch.device("meta"))
    assert model.config.pad_token_id == 0


def test_a_decoder_is_refused():
    settings = ModelSettings(name="x", config={"model_type": "bert", "is_decoder": True})
    with pytest.raises(BadConfig, match="not an encoder"):
        _config(settings)


@pytest.mark.parametrize("model_type", ["bart", "gpt2", "bertt"])
def test_what_is_no_masked_lm_encoder_is_refused(model_type):
    with pytest.raises(BadConfig):
        _config(ModelSettings(name="x", config={"model_type": model_type}))


def test_rows_longer_than_the_positions_are_refused():
    settings = ModelSettings(name="x", config={"model_type": "bert", "max_position_embeddings": 128})
    _config(settings, seq_length=128)
    with pytest.raises(BadConfig, match="129"):
        _config(settings, seq_length=129)


def test_roberta_loses_positions_to_its_padding():
    settings = ModelSettings(name="x", config={"model_type": "roberta", "max_position_embeddings": 128})
    _config(settings, seq_length=127)
    with pytest.raises(BadConfig, match="127 positions"):
        _config(settings, seq_length=128)


def test_a_config_that_transformers_refuses_is_bad_input():
    with pytest.raises(BadConfig):
        _config(ModelSettings(name="x", config={"model_type": "modernbert", "num_hidden_layers": "many"}))


def test_a_config_file_gives_its_shape_without_vocabulary_and_with_its_nulls(tmp_path):
    path = tmp_path / "my-encoder" / "config.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps({"model_type": "bert", "vocab_size": 7, "hidden_size": 64, "num_attention_heads": 4,
                    "classifier_dropout": None, "architectures": ["BertForMaskedLM"], "_name_or_path": "x"})
    )  # fmt: skip
    settings = model_settings(str(path))
    assert settings.name == "my-encoder"
    assert settings.config == {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}
    assert settings.null_keys == ["classifier_dropout"]
    assert model_settings(str(path.parent)) == settings


def test_a_config_that_wants_its_own_code_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "evil--code"}}))
    with pytest.raises(BadConfig, match="auto_map"):
        model_settings(str(path))


def test_a_misspelt_preset_suggests_the_nearest():
    with pytest.raises(BadConfig) as caught:
        model_settings("bert-120")
    assert "'bert-120m'" in caught.value.next_step


@pytest.mark.parametrize("directory", ["a|<script>", "..x", "ünïcode name", "-rf"])
def test_a_name_from_a_file_system_becomes_a_plain_file_name(tmp_path, directory):
    path = tmp_path / directory / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "bert"}))
    name = model_settings(str(path)).name
    assert name.replace("-", "").replace("_", "").isascii()
    assert name[0].isalnum()
    assert not set(name) & set("/|<> ")


def test_a_profile_cannot_name_a_model_that_leads_elsewhere():
    for name in ("../x", "/etc/x", ".hidden", ""):
        with pytest.raises(ValueError, match="name"):
            ModelSettings(name=name, config={"model_type": "bert"})


def test_parameters_that_the_loss_does_not_depend_on_are_frozen_and_no_others():
    shape = {
        "model_type": "esm",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
    }
    model = build_model(_config(ModelSettings(name="x", config=shape)), torch.device("cpu"))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all("contact_head" in name for name in frozen)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_frozen_in_bert():
    shape = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
    }
    model = build_model(_config(ModelSettings(name="x", config=shape)), torch.device("cpu"))
    assert all(parameter.requires_grad for parameter in model.parameters())
