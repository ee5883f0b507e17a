import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl

from tests.trainer import oracles
from trainer.config.train_config import ModelSettings
from trainer.data.manifest import SpecialIds
from trainer.data.micro_batch import MicroBatch
from trainer.errors import BadConfig
from trainer.model.attention import (
    CannotBePacked,
    Packing,
    choose_attention,
    pin_kernels,
)
from trainer.model.encoder import build_config, build_model
from trainer.model.masked_lm import MaskedLM
from trainer.model.packing import verify_packing
from trainer.model.varlen import VARLEN_NAME, attend_within_documents

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
META = torch.device("meta")


def _model_config(family: str = "bert", dropout: float = 0.0, **changes):
    """Return the configuration of a training, and the config of its model."""
    config = oracles.config_of(family, **changes)
    return config, build_config(
        config.model,
        vocab_size=100,
        special_ids=IDS,
        seq_length_tokens=64,
        attention_dropout=dropout,
    )


@pytest.fixture
def batch(dataset) -> MicroBatch:
    return oracles.micro_batches(dataset, oracles.config_of())[0]


def _change_document(batch: MicroBatch, number: int) -> MicroBatch:
    """Return the micro-batch with other ids for all tokens of one document."""
    start = int(batch.starts_N[number])
    end = start + int(batch.tokens_N[number])
    ids_T = batch.ids_BS.long().flatten()
    ids_T[start:end] = (ids_T[start:end] + 1) % 120
    ids_BS = ids_T.view_as(batch.ids_BS).to(torch.uint16)
    return dataclasses.replace(batch, ids_BS=ids_BS)


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("kind", ["sdpa", "varlen"])
def test_document_influences_itself_only(family, kind, dataset, monkeypatch):
    if kind == "varlen":
        oracles.choose_varlen(monkeypatch)
    # Logits of all positions, not only of those to predict.
    config = oracles.config_of(
        family, mlm_head="dense", micro_batch_size=2, global_batch_size=2
    )
    module = oracles.training_of(config, dataset).module
    module.eval()
    assert module.attention.kind == kind
    (batch,) = oracles.micro_batches(dataset, config)
    changed_batch = _change_document(batch, len(batch.starts_N) // 2)
    is_changed_BS = batch.wide_ids_BS() != changed_batch.wide_ids_BS()
    is_changed_T = is_changed_BS.flatten()

    with torch.no_grad():
        before_TV, _ = module._predict(batch)
        after_TV, _ = module._predict(changed_batch)

    # The logits of all others stay as they are, to the last bit.
    assert torch.equal(before_TV[~is_changed_T], after_TV[~is_changed_T])
    difference_TV = (before_TV - after_TV)[is_changed_T].abs()
    assert (difference_TV.amax(dim=1) > 0).all()


@pytest.mark.parametrize("family", oracles.FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded", "bucketed"])
@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
def test_varlen_learns_as_masked_sequences_do(
    family, layout, last_layer, dataset, monkeypatch
):
    config = oracles.config_of(family, layout=layout, last_layer=last_layer)
    expected = oracles.learned(config, dataset)
    oracles.choose_varlen(monkeypatch)
    oracles.check_alike(oracles.learned(config, dataset), expected, gradient=1e-5)


@pytest.mark.parametrize("family", oracles.FAMILIES)
def test_varlen_step_traces_on_meta_device(family, batch):
    config, model_config = _model_config(
        family, precision="bf16", device="cuda", compile=False
    )
    chosen = choose_attention(config, model_config, META, verify_packing(model_config))
    assert chosen.kind == "varlen"
    model = build_model(model_config, META, VARLEN_NAME).to(torch.bfloat16)
    loss = MaskedLM(model, config, chosen)(batch.to(META))
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_varlen_rejects_dropout():
    heads = [torch.empty(1, 2, 8, 16, device=META) for _ in range(3)]
    edges = torch.empty(2, dtype=torch.int32, device=META)
    with pytest.raises(ValueError, match="neither dropout nor masks"):
        attend_within_documents(
            torch.nn.Module(),
            *heads,
            None,
            cu_seq_lens_q=edges,
            max_length_q=8,
            dropout=0.1,
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
    @pytest.mark.parametrize("kind", ["varlen", "fa3"])
    def test_is_rejected_if_configured(self, device, changes, reason, kind):
        config, model_config = _model_config(attention=kind, **changes)
        with pytest.raises(BadConfig, match=reason):
            choose_attention(config, model_config, torch.device(device), Packing())

    def test_is_left_by_auto(self, device, changes, reason):
        config, model_config = _model_config(attention="auto", **changes)
        chosen = choose_attention(config, model_config, torch.device(device), Packing())
        assert chosen.kind == "sdpa"
        assert reason in chosen.reason


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_rejects_flash_attention_3_without_hopper(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another GPU")
    config, model_config = _model_config(
        precision="bf16", device="cuda", attention="fa3"
    )
    with pytest.raises(BadConfig, match="requires a Hopper GPU, not another GPU"):
        choose_attention(config, model_config, torch.device("cuda"), Packing())


def test_activates_flash_attention_3_only_if_chosen(monkeypatch):
    def register_nothing():
        return SimpleNamespace(remove=lambda: None)

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register_nothing)
    for other_kind in ("varlen", "sdpa"):
        pin_kernels("fa3")
        assert current_flash_attention_impl() == "FA3"
        pin_kernels(other_kind)
        assert current_flash_attention_impl() is None


def test_rejects_flash_attention_3_that_is_not_installed():
    with pytest.raises(BadConfig, match="No module named 'flash_attn_interface'"):
        pin_kernels("fa3")


def _add_empty_sequences(batch: MicroBatch, sequences: int) -> MicroBatch:
    width = batch.ids_BS.shape[1]
    padding_BS = torch.zeros(sequences, width, dtype=batch.ids_BS.dtype)
    return dataclasses.replace(
        batch,
        ids_BS=torch.cat([batch.ids_BS, padding_BS]),
        padded_sequences=batch.padded_sequences + sequences,
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [("bert", "packed"), ("bert", "padded"), ("modernbert", "packed")],
)
def test_flash_attention_3_gets_no_empty_segment(family, layout, dataset, monkeypatch):
    # So few masks that most documents have none.
    config = oracles.config_of(family, layout=layout, masking_probability=0.02)
    with_mask = oracles.training_of(config, dataset)
    oracles.choose_varlen(monkeypatch, "fa3")
    with_fa3 = oracles.training_of(config, dataset)
    for number, batch in enumerate(oracles.micro_batches(dataset, config, steps=5)):
        # In turns as on a CPU, and with a fixed number of slots as on GPUs.
        with_fa3.module._fixed_slots = 64 if number % 2 else None
        batch_with_empty_sequences = _add_empty_sequences(batch, number % 3)
        oracles.check_alike(
            oracles.gradients_of(with_fa3, [batch_with_empty_sequences]),
            oracles.gradients_of(with_mask, [batch_with_empty_sequences]),
            gradient=1e-5,
        )


def test_rejects_packing_of_encoder_that_cannot():
    config, model_config = _model_config()
    with pytest.raises(BadConfig, match=r"neither packed sequences .*: for a reason"):
        choose_attention(
            config,
            model_config,
            torch.device("cpu"),
            CannotBePacked(reason="for a reason"),
        )


def test_encoder_that_cannot_be_packed_uses_padding_mask():
    config, model_config = _model_config()
    padded = config.model_copy(update={"layout": "padded"})
    chosen = choose_attention(
        padded,
        model_config,
        torch.device("cpu"),
        CannotBePacked(reason="for a reason"),
    )
    assert chosen.kind == "row"
    assert chosen.reason == "padding mask of bert: for a reason"


def test_names_changed_attention_dropout(dataset):
    shape = oracles.SHAPES["bert"] | {"attention_probs_dropout_prob": 0.1}
    config = oracles.config_of(
        model=ModelSettings(name="m", config=shape), attention_dropout=0.0
    )
    training = oracles.training_of(config, dataset)
    assert training.recipe_changes == ["attention dropout 0 instead of the model's 0.1"]
    assert training.module.model.config.attention_probs_dropout_prob == 0
    unchanged = config.model_copy(update={"attention_dropout": None})
    assert oracles.training_of(unchanged, dataset).recipe_changes == []
