import json
import math

import pytest
import torch

from trainer.config.presets import PRESETS, model_settings
from trainer.config.train_config import ModelSettings
from trainer.data.dataset import SpecialIds
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


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_with_a_vocabulary_of_whole_tiles_and_about_the_size_in_its_name(
    name,
):
    model = build_model(
        _config(model_settings(name), vocab_size=22_001), torch.device("meta")
    )
    assert model.get_output_embeddings().weight.shape[0] == 22_016
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    least, most = {"bert-120m": (100, 125), "bert-350m": (320, 355)}.get(
        name, (0, math.inf)
    )
    assert (
        least < sum(parameter.numel() for parameter in model.parameters()) / 1e6 < most
    )


@pytest.mark.parametrize(
    ("shape", "seq_length", "why"),
    [
        ({"model_type": "bert", "is_decoder": True}, 64, "not an encoder"),
        ({"model_type": "bart"}, 64, "not an encoder"),
        ({"model_type": "gpt2"}, 64, "no masked-LM model of type 'gpt2'"),
        ({"model_type": "bertt"}, 64, "no masked-LM model of type 'bertt'"),
        (
            {"model_type": "modernbert", "num_hidden_layers": "many"},
            64,
            "transformers rejects the config",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(shape, seq_length, why):
    with pytest.raises(BadConfig, match=why):
        _config(ModelSettings(name="x", config=shape), seq_length)


@pytest.mark.parametrize(("model_type", "positions"), [("bert", 128), ("roberta", 127)])
def test_rows_may_be_as_long_as_the_positions_that_padding_leaves(
    model_type, positions
):
    settings = ModelSettings(
        name="x", config={"model_type": model_type, "max_position_embeddings": 128}
    )
    assert _config(settings, positions).max_position_embeddings == 128
    with pytest.raises(
        BadConfig,
        match=f"sequence length {positions + 1} exceeds the {positions} positions",
    ):
        _config(settings, positions + 1)


def test_a_config_file_gives_its_shape_without_vocabulary_and_with_its_nulls(tmp_path):
    path = tmp_path / "my-encoder" / "config.json"
    path.parent.mkdir()
    shape = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}
    others = {
        "vocab_size": 7,
        "classifier_dropout": None,
        "architectures": ["BertForMaskedLM"],
        "_name_or_path": "x",
    }
    path.write_text(json.dumps(shape | others))
    settings = model_settings(str(path))
    assert (settings.name, settings.config, settings.null_keys) == (
        "my-encoder",
        shape,
        ["classifier_dropout"],
    )
    assert model_settings(str(path.parent)) == settings


def test_a_misspelt_preset_and_a_config_that_wants_its_own_code_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "evil--code"}})
    )
    with pytest.raises(BadConfig, match="auto_map"):
        model_settings(str(path))
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
def test_a_name_from_a_file_system_becomes_a_plain_file_name(tmp_path, directory, name):
    path = tmp_path / directory / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "bert"}))
    assert model_settings(str(path)).name == name


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", ""])
def test_a_profile_cannot_name_a_model_that_leads_elsewhere(name):
    with pytest.raises(ValueError, match="name"):
        ModelSettings(name=name, config={"model_type": "bert"})


@pytest.mark.parametrize(
    ("model_type", "unused"),
    [
        ("esm", {"contact_head"}),
        *(
            (name, set())
            for name in ("bert", "roberta", "distilbert", "electra", "mpnet")
        ),
    ],
)
def test_an_encoder_builds_from_its_type_with_those_parameters_frozen_that_no_loss_depends_on(
    model_type, unused
):
    model = build_model(_config(_small(model_type)), torch.device("cpu"))
    frozen = {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    assert {
        part for name in frozen for part in name.split(".") if part.endswith("_head")
    } == unused
    assert bool(frozen) == bool(unused)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config.pad_token_id == 0
