import contextlib
import dataclasses
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tests.trainer import oracles
from trainer.config.train_config import ModelSettings
from trainer.data.dataset import SpecialIds
from trainer.data.loader import MicroBatch
from trainer.errors import BadConfig
from trainer.model import attention, packing, sparse_last_layer
from trainer.model.attention import ChosenAttention, Packing, choose_attention
from trainer.model.encoder import (
    build_config,
    build_model,
    fresh_model,
    model_head,
    model_layers,
)
from trainer.model.families import FAMILIES
from trainer.model.packing import verify_packing, verify_working_copies

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
}
_OWN_SIZES = {"electra": {"embedding_size": 64}, "squeezebert": {"embedding_size": 64}}


def _config(model_type, **changes):
    shape = (
        {"model_type": model_type} | SMALL | _OWN_SIZES.get(model_type, {}) | changes
    )
    return build_config(
        ModelSettings(name="m", config=shape),
        vocab_size=100,
        special_ids=IDS,
        seq_length_tokens=64,
    )


def _can_be_packed(model_type) -> bool:
    try:
        config = _config(model_type)
    # No encoder, or without a number of layers.
    except (BadConfig, NotImplementedError):
        return False
    can = isinstance(verify_packing(config), Packing)
    assert not can or verify_working_copies(config) is None
    return can


@pytest.mark.slow
def test_the_table_lists_every_encoder_of_the_library_that_a_probe_proves():
    assert {
        name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if _can_be_packed(name)
    } == FAMILIES.keys()


@pytest.mark.parametrize(
    ("model_type", "changes", "found"),
    [
        ("bert", {}, Packing()),
        ("roberta", {}, Packing(first_position=1)),
        ("modernbert", {}, Packing()),
        ("eurobert", {"num_key_value_heads": 2}, Packing()),
        ("esm", {}, Packing(first_position=1, needs_embeddings=True)),
        (
            "esm",
            {"position_embedding_type": "rotary", "token_dropout": True},
            Packing(needs_embeddings=True),
        ),
    ],
)
def test_a_probe_finds_where_positions_begin_and_what_an_encoder_takes(
    model_type, changes, found
):
    assert verify_packing(_config(model_type, **changes)) == found


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mpnet", {}, "other logits than each alone"),
        ("convbert", {}, "influence each other"),
        ("deberta", {}, "does not take the bounds of documents"),
        ("big_bird", {}, "sparse in sequences longer"),
        ("reformer", {}, "cannot be computed"),
    ],
)
def test_an_encoder_that_cannot_be_packed_is_found_with_the_reason(
    model_type, changes, reason
):
    assert reason in verify_packing(_config(model_type, **changes))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("convbert", "KeyError"),
        ("longformer", "inplace"),
        ("big_bird", "sparse"),
        ("bert", "with other inputs"),
    ],
)
def test_an_encoder_that_cannot_compute_with_working_copies_is_found_with_the_reason(
    model_type, reason, monkeypatch
):
    def with_keys_of_another_input(*known):
        model = fresh_model(*known)
        for name, part in model.named_modules():
            if name.endswith("self.key"):
                part.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
        return model

    monkeypatch.setattr(packing, "fresh_model", with_keys_of_another_input)
    packing._check_built.cache_clear()
    assert reason in verify_working_copies(_config(model_type))
    packing._check_built.cache_clear()


def test_an_attention_of_an_encoders_own_leaves_no_choice_but_a_mask():
    found = verify_packing(_config("megatron-bert"))
    assert found.no_varlen_reason == "packed documents influence each other"
    config = oracles.config_of("megatron-bert", precision="bf16", device="cuda")
    chosen = choose_attention(
        config, _config("megatron-bert"), torch.device("meta"), found
    )
    assert (chosen.kind, chosen.reason) == (
        "sdpa",
        f"with varlen {found.no_varlen_reason}",
    )


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("documents", "influence each other"),
        ("positions", "other logits"),
        ("head", "cannot be computed"),
    ],
)
def test_what_would_mix_or_move_documents_is_found(broken, reason, monkeypatch):
    """The probe's own path, with one part of it wrong."""
    packing._check_built.cache_clear()
    places = attention.document_positions

    def wrong(batch):
        document_BS, position_BS = places(batch)
        if broken == "documents":
            return torch.ones_like(document_BS), position_BS
        return document_BS, torch.arange(position_BS.numel()).view_as(position_BS)

    if broken == "head":
        monkeypatch.setattr(packing, "head_inputs", lambda *_: contextlib.nullcontext())
    else:
        monkeypatch.setattr(attention, "document_positions", wrong)
    assert reason in verify_packing(_config("bert"))
    packing._check_built.cache_clear()


def test_a_probe_leaves_random_numbers_and_modes_as_they_were():
    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Watch.seen += 1
            return func(*args, **(kwargs or {}))

    packing._check_built.cache_clear()
    config, state = _config("bert"), torch.get_rng_state()
    with Watch(), torch.device("meta"):
        assert verify_packing(config) == Packing()
    assert Watch.seen == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "model_type", ["bert", "modernbert", "esm", "eurobert", "distilbert"]
)
def test_layers_and_head_are_found(model_type):
    model = build_model(_config(model_type), torch.device("meta"))
    assert len(model_layers(model)) == 3
    ours, heads = (
        set(model.base_model.parameters()),
        {one for part in model_head(model) for one in part.parameters()},
    )
    assert ours | heads == set(model.parameters())


def _one_by_one(batch: MicroBatch) -> MicroBatch:
    """The same documents, each in a sequence of its own."""
    width, starts_N = batch.ids_BS.shape[1], batch.starts_N.long()
    ids = torch.zeros(len(starts_N), width, dtype=batch.ids_BS.dtype)
    for number, (start, tokens) in enumerate(
        zip(starts_N.tolist(), batch.tokens_N.tolist(), strict=True)
    ):
        ids[number, :tokens] = batch.ids_BS.flatten()[start : start + tokens]
    predicted_P = batch.predicted_P.long()
    document_P = torch.searchsorted(starts_N, predicted_P, right=True) - 1
    return dataclasses.replace(
        batch,
        ids_BS=ids,
        starts_N=(torch.arange(len(starts_N)) * width).int(),
        predicted_P=(document_P * width + predicted_P - starts_N[document_P]).int(),
    )


@pytest.mark.parametrize(
    ("family", "way", "precision"),
    [
        *itertools.product(
            ("esm", "eurobert", "distilbert", "electra"), ("sdpa", "varlen"), ("fp32",)
        ),
        ("megatron-bert", "sdpa", "fp32"),
        ("bert", "sdpa", "bf16"),
        ("esm", "sdpa", "bf16"),
    ],
)
def test_packed_documents_learn_what_they_learn_one_by_one(
    family, way, precision, dataset, monkeypatch
):
    config = oracles.config_of(family, precision=precision)
    batches = oracles.micro_batches(dataset, config)
    if way == "varlen":
        monkeypatch.setattr(
            sparse_last_layer, "varlen_attn", oracles.attend_within_edges
        )
        monkeypatch.setattr(
            "trainer.build.choose_attention",
            lambda *of: dataclasses.replace(choose_attention(*of), kind="varlen"),
        )
    packed = oracles.training_of(config, dataset)
    assert packed.module.attention.kind == way
    found = oracles.gradients_of(packed, batches)
    monkeypatch.setattr(
        "trainer.build.choose_attention",
        lambda *_: ChosenAttention(kind="row", reason="test"),
    )
    alone = [_one_by_one(batch) for batch in batches]
    changes = {
        "micro_batch_size": len(alone[0].ids_BS),
        "global_batch_size": len(alone[0].ids_BS),
    }
    padded = oracles.training_of(
        config.model_copy(update={"layout": "padded", **changes}), dataset
    )
    loss, gradient = (1e-6, 1e-5) if precision == "fp32" else (1e-3, 2e-2)
    oracles.check_alike(
        oracles.gradients_of(padded, alone), found, loss=loss, gradient=gradient
    )
