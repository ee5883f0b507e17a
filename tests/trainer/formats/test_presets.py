import json
from pathlib import Path

import pytest

from trainer.formats.errors import BadConfig
from trainer.formats.presets import model_settings
from trainer.formats.train_config import ModelSettings

SHAPE = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}


@pytest.fixture
def config_file(tmp_path) -> Path:
    """A config.json as transformers writes it, which has more keys than a shape."""
    path = tmp_path / "my-encoder" / "config.json"
    path.parent.mkdir()
    other_keys = {
        "vocab_size": 7,
        "classifier_dropout": None,
        "architectures": ["BertForMaskedLM"],
        "_name_or_path": "x",
    }
    path.write_text(json.dumps(SHAPE | other_keys))
    return path


def test_config_file_gives_shape(config_file):
    settings = model_settings(str(config_file))
    assert settings.name == "my-encoder"
    assert settings.config == SHAPE
    assert settings.null_keys == ["classifier_dropout"]


def test_directory_stands_for_its_config_file(config_file):
    settings = model_settings(str(config_file.parent))
    assert settings == model_settings(str(config_file))


def test_profile_gives_shape(tmp_path):
    profile = tmp_path / "profile.toml"
    profile.write_text("""
[train.model]
name = "my-encoder"
null_keys = ["classifier_dropout"]
[train.model.config]
model_type = "bert"
hidden_size = 64
""")
    assert model_settings(str(profile)) == ModelSettings(
        name="my-encoder",
        config={"model_type": "bert", "hidden_size": 64},
        null_keys=["classifier_dropout"],
    )


def test_rejects_profile_without_a_model(tmp_path):
    profile = tmp_path / "profile.toml"
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
    with pytest.raises(BadConfig) as raised:
        model_settings("bert-120")
    assert "'bert-120m'" in raised.value.next_step


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        pytest.param("a|<script>", "a-script", id="characters of shells and HTML"),
        pytest.param("..x", "x", id="dots in front"),
        pytest.param("ünïcode name", "n-code-name", id="other letters and spaces"),
        pytest.param("-rf", "rf", id="like an option"),
    ],
)
def test_model_name_is_name_of_its_directory(tmp_path, directory, name):
    path = tmp_path / directory / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "bert"}))
    assert model_settings(str(path)).name == name


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", ""])
def test_rejects_name_that_is_no_plain_file_name(name):
    with pytest.raises(ValueError, match="name"):
        ModelSettings(name=name, config={"model_type": "bert"})
