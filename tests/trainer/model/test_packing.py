import contextlib
import dataclasses
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tests.trainer import oracles
from trainer.config.train_config import ModelSettings
from trainer.data.manifest import SpecialIds
from trainer.data.micro_batch import MicroBatch
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


@pytest.fixture
def no_cached_results():
    """Check models again in this test, and after it."""
    packing._check_built.cache_clear()
    yield
    packing._check_built.cache_clear()


def _can_be_packed(model_type) -> bool:
    try:
        config = _config(model_type)
    # No encoder, or without a number of layers.
    except (BadConfig, NotImplementedError):
        return False
    if not isinstance(verify_packing(config), Packing):
        return False
    assert verify_working_copies(config) is None
    return True


@pytest.mark.slow
def test_table_lists_every_verified_encoder():
    verified = {
        name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if _can_be_packed(name)
    }
    assert verified == FAMILIES.keys()


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
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
def test_finds_packing_of_encoder(model_type, changes, expected):
    assert verify_packing(_config(model_type, **changes)) == expected


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mpnet", "other logits than each alone"),
        ("convbert", "influence each other"),
        ("deberta", "does not take the bounds of documents"),
        ("big_bird", "sparse in sequences longer"),
        ("reformer", "cannot be computed"),
    ],
)
def test_gives_reason_against_packing(model_type, reason):
    assert reason in verify_packing(_config(model_type))


@pytest.mark.usefixtures("no_cached_results")
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("convbert", "KeyError"),
        ("longformer", "inplace"),
        ("big_bird", "sparse"),
        ("bert", "with other inputs"),
    ],
)
def test_gives_reason_against_working_copies(model_type, reason, monkeypatch):
    def with_keys_of_another_input(*arguments):
        model = fresh_model(*arguments)
        for name, part in model.named_modules():
            if name.endswith("self.key"):
                part.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
        return model

    monkeypatch.setattr(packing, "fresh_model", with_keys_of_another_input)
    assert reason in verify_working_copies(_config(model_type))


def test_encoder_with_attention_of_its_own_needs_mask():
    verified = verify_packing(_config("megatron-bert"))
    assert verified.no_varlen_reason == "packed documents influence each other"
    config = oracles.config_of("megatron-bert", precision="bf16", device="cuda")
    chosen = choose_attention(
        config, _config("megatron-bert"), torch.device("meta"), verified
    )
    assert chosen.kind == "sdpa"
    assert chosen.reason == f"with varlen {verified.no_varlen_reason}"


@pytest.mark.usefixtures("no_cached_results")
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("documents", "influence each other"),
        ("positions", "other logits"),
        ("head", "cannot be computed"),
    ],
)
def test_finds_broken_packing(broken, reason, monkeypatch):
    """The check's own path, with one part of it wrong."""
    document_positions = attention.document_positions

    def wrong(batch):
        document_BS, position_BS = document_positions(batch)
        if broken == "documents":
            return torch.ones_like(document_BS), position_BS
        return document_BS, torch.arange(position_BS.numel()).view_as(position_BS)

    if broken == "head":
        monkeypatch.setattr(packing, "head_inputs", lambda *_: contextlib.nullcontext())
    else:
        monkeypatch.setattr(attention, "document_positions", wrong)
    assert reason in verify_packing(_config("bert"))


@pytest.mark.usefixtures("no_cached_results")
def test_check_changes_no_random_numbers_or_modes():
    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Watch.seen += 1
            return func(*args, **(kwargs or {}))

    config = _config("bert")
    state = torch.get_rng_state()
    with Watch(), torch.device("meta"):
        assert verify_packing(config) == Packing()
    assert Watch.seen == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "model_type", ["bert", "modernbert", "esm", "eurobert", "distilbert"]
)
def test_finds_layers_and_head(model_type):
    model = build_model(_config(model_type), torch.device("meta"))
    assert len(model_layers(model)) == 3
    parameters = set(model.base_model.parameters())
    for part in model_head(model):
        parameters.update(part.parameters())
    assert parameters == set(model.parameters())


def _one_by_one(batch: MicroBatch) -> MicroBatch:
    """Return the same documents, each in a sequence of its own."""
    width = batch.ids_BS.shape[1]
    starts_N = batch.starts_N.long()
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
    ("family", "kind", "precision"),
    [
        *itertools.product(
            ("esm", "eurobert", "distilbert", "electra"), ("sdpa", "varlen"), ("fp32",)
        ),
        ("megatron-bert", "sdpa", "fp32"),
        ("bert", "sdpa", "bf16"),
        ("esm", "sdpa", "bf16"),
    ],
)
def test_packed_documents_learn_as_one_by_one(
    family, kind, precision, dataset, monkeypatch
):
    config = oracles.config_of(family, precision=precision)
    batches = oracles.micro_batches(dataset, config)
    if kind == "varlen":
        monkeypatch.setattr(
            sparse_last_layer, "varlen_attn", oracles.attend_within_edges
        )
        monkeypatch.setattr(
            "trainer.build.choose_attention",
            lambda *arguments: dataclasses.replace(
                choose_attention(*arguments), kind="varlen"
            ),
        )
    packed = oracles.training_of(config, dataset)
    assert packed.module.attention.kind == kind
    learned_packed = oracles.gradients_of(packed, batches)
    monkeypatch.setattr(
        "trainer.build.choose_attention",
        lambda *_: ChosenAttention(kind="row", reason="test"),
    )
    alone = [_one_by_one(batch) for batch in batches]
    sequences = len(alone[0].ids_BS)
    padded_config = config.model_copy(
        update={
            "layout": "padded",
            "micro_batch_size": sequences,
            "global_batch_size": sequences,
        }
    )
    padded = oracles.training_of(padded_config, dataset)
    oracles.check_alike(
        oracles.gradients_of(padded, alone),
        learned_packed,
        loss=1e-6 if precision == "fp32" else 1e-3,
        gradient=1e-5 if precision == "fp32" else 2e-2,
    )
