import json

import pytest

from trainer.config.presets import model_settings
from trainer.config.train_config import ModelSettings
from trainer.errors import BadConfig


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
