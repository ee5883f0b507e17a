"""Choice of the attention, and of the kernels that compute it."""

import pytest
import torch

from tests.trainer.tiny_models import SHAPES, config_of, training_of
from trainer.config import packages
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import ModelSettings
from trainer.model.attention import (
    CannotBePacked,
    Packing,
    choose_attention,
)
from trainer.model.encoder_config import build_config


def _training_and_model_config(dropout: float = 0.0, **changes):
    """Return the configuration of a training of BERT, and the config of its model."""
    config = config_of("bert", **changes)
    return config, build_config(
        config.model,
        vocab_size=100,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
        seq_length_tokens=64,
        attention_dropout=dropout,
    )


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        pytest.param("cpu", {"precision": "bf16"}, "requires a GPU", id="on a CPU"),
        pytest.param(
            "meta",
            {"precision": "bf16", "device": "cpu"},
            "requires a GPU",
            id="traced for a CPU",
        ),
        pytest.param(
            "meta", {"precision": "fp32", "device": "cuda"}, "bf16", id="fp32"
        ),
        pytest.param(
            "meta",
            {"precision": "bf16", "device": "cuda", "dropout": 0.1},
            "attention dropout",
            id="dropout",
        ),
    ],
)
class TestVarlenThatCannotBeUsed:
    @pytest.mark.parametrize("kind", ["varlen", "fa4"])
    def test_is_rejected_if_configured(self, device, changes, reason, kind):
        config, model_config = _training_and_model_config(attention=kind, **changes)
        with pytest.raises(BadConfig, match=reason):
            choose_attention(config, model_config, torch.device(device), Packing())

    def test_makes_auto_choose_a_mask(self, device, changes, reason):
        config, model_config = _training_and_model_config(attention="auto", **changes)
        chosen = choose_attention(config, model_config, torch.device(device), Packing())
        assert chosen.kind == "sdpa"
        assert reason in chosen.reason


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that chooses fa4 on a GPU of a compute capability."""

    def choose(capability, version):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another GPU")
        monkeypatch.setattr(packages, "flash_attention_4_version", lambda: version)
        config, model_config = _training_and_model_config(
            precision="bf16", device="cuda", attention="fa4"
        )
        return choose_attention(
            config, model_config, torch.device("cuda"), Packing()
        ).kind

    return choose


@pytest.mark.parametrize(
    "capability",
    [pytest.param((8, 0), id="Ampere"), pytest.param((10, 0), id="Blackwell")],
)
def test_rejects_flash_attention_4_without_hopper(capability, on_gpu):
    with pytest.raises(BadConfig, match="requires a Hopper GPU, not another GPU"):
        on_gpu(capability, "4.0.0b36")


def test_rejects_flash_attention_4_that_is_not_installed(on_gpu):
    with pytest.raises(BadConfig, match="not installed") as raised:
        on_gpu((9, 0), None)
    assert "pip install '.[fa4]'" in raised.value.next_step


def test_takes_flash_attention_4_on_hopper(on_gpu):
    assert on_gpu((9, 0), "4.0.0b36") == "fa4"


def test_rejects_packing_of_encoder_that_cannot():
    config, model_config = _training_and_model_config()
    with pytest.raises(BadConfig, match=r"neither packed sequences .*: for a reason"):
        choose_attention(
            config,
            model_config,
            torch.device("cpu"),
            CannotBePacked(reason="for a reason"),
        )


def test_encoder_that_cannot_be_packed_uses_padding_mask():
    config, model_config = _training_and_model_config()
    padded = config.model_copy(update={"layout": "padded"})
    chosen = choose_attention(
        padded,
        model_config,
        torch.device("cpu"),
        CannotBePacked(reason="for a reason"),
    )
    assert chosen.kind == "row"
    assert chosen.reason == "padding mask of bert: for a reason"


class TestAttentionDropoutOfTraining:
    """A model whose own attention dropout is 0.1."""

    @staticmethod
    def _training(attention_dropout, dataset):
        shape = SHAPES["bert"] | {"attention_probs_dropout_prob": 0.1}
        config = config_of(
            model=ModelSettings(name="m", config=shape),
            attention_dropout=attention_dropout,
        )
        return training_of(config, dataset)

    def test_replaces_that_of_model(self, dataset):
        model = self._training(0.0, dataset).module.model
        assert model.config.attention_probs_dropout_prob == 0

    def test_is_named_as_change_of_recipe(self, dataset):
        training = self._training(0.0, dataset)
        expected = "attention dropout 0 instead of the model's 0.1"
        assert training.recipe_changes == [expected]

    def test_is_no_change_if_not_set(self, dataset):
        assert self._training(None, dataset).recipe_changes == []
