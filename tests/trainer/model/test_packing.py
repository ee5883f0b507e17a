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
from trainer.model import encoder_inputs, packing, probe
from trainer.model.attention import (
    CannotBePacked,
    ChosenAttention,
    Packing,
    choose_attention,
)
from trainer.model.encoder import (
    build_config,
    build_model,
    fresh_model,
    model_head,
    model_layers,
)
from trainer.model.encoder_inputs import document_positions
from trainer.model.families import FAMILIES
from trainer.model.packing import verify_packing
from trainer.model.verify_copies import verify_working_copies

IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
}
_OWN_SIZES = {"electra": {"embedding_size": 64}, "squeezebert": {"embedding_size": 64}}
"""Sizes of an architecture that must match those of ``SMALL``."""


def _config(model_type, **changes):
    own_sizes = _OWN_SIZES.get(model_type, {})
    shape = {"model_type": model_type} | SMALL | own_sizes | changes
    return build_config(
        ModelSettings(name="m", config=shape),
        vocab_size=100,
        special_ids=IDS,
        seq_length_tokens=64,
    )


@pytest.fixture
def no_cached_results():
    """Check models again in this test, and after it."""
    probe.check_built.cache_clear()
    yield
    probe.check_built.cache_clear()


def _can_be_packed(model_type) -> bool:
    try:
        config = _config(model_type)
    # No encoder, or without a number of layers.
    except (BadConfig, NotImplementedError):
        return False
    return isinstance(verify_packing(config), Packing)


@pytest.mark.slow
def test_table_lists_every_verified_encoder():
    verified = {
        name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if _can_be_packed(name)
    }
    assert verified == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_listed_encoder_takes_working_copies(model_type):
    assert verify_working_copies(_config(model_type)) is None


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        pytest.param("bert", {}, Packing(), id="bert"),
        pytest.param("roberta", {}, Packing(first_position=1), id="roberta"),
        pytest.param("modernbert", {}, Packing(), id="modernbert"),
        pytest.param(
            "eurobert", {"num_key_value_heads": 2}, Packing(), id="grouped queries"
        ),
        pytest.param(
            "esm", {}, Packing(first_position=1, needs_embeddings=True), id="esm"
        ),
        pytest.param(
            "esm",
            {"position_embedding_type": "rotary", "token_dropout": True},
            Packing(needs_embeddings=True),
            id="esm without position embeddings",
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
    verified = verify_packing(_config(model_type))
    assert isinstance(verified, CannotBePacked)
    assert reason in verified.reason


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("convbert", "KeyError"), ("longformer", "inplace"), ("big_bird", "sparse")],
)
def test_gives_reason_against_working_copies(model_type, reason):
    assert reason in verify_working_copies(_config(model_type))


@pytest.mark.usefixtures("no_cached_results")
def test_rejects_copies_for_keys_of_another_input(monkeypatch):
    def double_input(_, inputs):
        return (2 * inputs[0],)

    def model_with_keys_of_another_input(*arguments):
        model = fresh_model(*arguments)
        for name, part in model.named_modules():
            if name.endswith("self.key"):
                part.register_forward_pre_hook(double_input)
        return model

    monkeypatch.setattr(probe, "fresh_model", model_with_keys_of_another_input)
    assert "with other inputs" in verify_working_copies(_config("bert"))


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
class TestBrokenPacking:
    """Each test breaks one part of what the check relies on."""

    def test_is_found_in_documents(self, monkeypatch):
        def one_document(batch):
            document_BS, index_BS = document_positions(batch)
            return torch.ones_like(document_BS), index_BS

        monkeypatch.setattr(encoder_inputs, "document_positions", one_document)
        assert "influence each other" in verify_packing(_config("bert")).reason

    def test_is_found_in_positions(self, monkeypatch):
        def positions_of_whole_sequence(batch):
            document_BS, index_BS = document_positions(batch)
            return document_BS, torch.arange(index_BS.numel()).view_as(index_BS)

        monkeypatch.setattr(
            encoder_inputs, "document_positions", positions_of_whole_sequence
        )
        assert "other logits" in verify_packing(_config("bert")).reason

    def test_is_found_in_head(self, monkeypatch):
        monkeypatch.setattr(packing, "head_inputs", lambda *_: contextlib.nullcontext())
        assert "cannot be computed" in verify_packing(_config("bert")).reason


@pytest.mark.usefixtures("no_cached_results")
def test_check_changes_no_random_numbers_or_modes():
    class OperationCounter(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            return func(*args, **(kwargs or {}))

    config = _config("bert")
    state = torch.get_rng_state()
    counter = OperationCounter()
    with counter, torch.device("meta"):
        assert verify_packing(config) == Packing()
    assert counter.operations == 0
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
        oracles.choose_varlen(monkeypatch)
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
