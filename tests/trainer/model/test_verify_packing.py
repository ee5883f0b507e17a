"""Which encoders compute packed documents as if each were alone."""

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tests.trainer.gradients import assert_gradients_agree, loss_and_gradients
from tests.trainer.masked_attention import choose_varlen
from tests.trainer.model.small_models import small_config
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.data.micro_batch import MicroBatch
from trainer.formats.errors import BadConfig
from trainer.formats.families import FAMILIES
from trainer.model import encoder_inputs
from trainer.model import verify_packing as verify_packing_module
from trainer.model.attention import (
    CannotBePacked,
    ChosenAttention,
    Packing,
    choose_attention,
)
from trainer.model.verify_packing import verify_packing


def _can_be_packed(model_type) -> bool:
    try:
        config = small_config(model_type)
    # The model is no encoder, or its config does not have a number of layers.
    except (BadConfig, NotImplementedError):
        return False
    return isinstance(verify_packing(config), Packing)


@pytest.mark.slow
def test_table_lists_every_verified_encoder():
    verified = {
        name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if _can_be_packed(name)
    }
    assert verified == FAMILIES.keys()


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
    assert verify_packing(small_config(model_type, **changes)) == expected


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
    verified = verify_packing(small_config(model_type))
    assert isinstance(verified, CannotBePacked)
    assert reason in verified.reason


def test_encoder_with_attention_of_its_own_needs_mask():
    verified = verify_packing(small_config("megatron-bert"))
    assert verified.no_varlen_reason == "packed documents influence each other"
    config = config_of("megatron-bert", precision="bf16", device="cuda")
    chosen = choose_attention(
        config, small_config("megatron-bert"), torch.device("meta"), verified
    )
    assert chosen.kind == "sdpa"
    assert chosen.reason == f"with varlen {verified.no_varlen_reason}"


@pytest.mark.usefixtures("no_cached_results")
class TestBrokenPacking:
    """Each test breaks one part of what the check relies on."""

    def test_is_found_in_documents(self, monkeypatch):
        monkeypatch.setattr(
            MicroBatch, "begin_BS", lambda batch: torch.zeros_like(batch.index_BS)
        )
        assert "influence each other" in verify_packing(small_config("bert")).reason

    def test_is_found_in_positions(self, monkeypatch):
        def positions_in_whole_sequence(batch, packing):
            index_BS = batch.index_BS
            return torch.arange(index_BS.numel()).view_as(index_BS)

        monkeypatch.setattr(
            encoder_inputs, "_position_ids", positions_in_whole_sequence
        )
        assert "other logits" in verify_packing(small_config("bert")).reason

    def test_is_found_in_head(self, monkeypatch):
        monkeypatch.setattr(
            verify_packing_module, "head_inputs", lambda *_: contextlib.nullcontext()
        )
        assert "cannot be computed" in verify_packing(small_config("bert")).reason


@pytest.mark.usefixtures("no_cached_results")
def test_check_draws_no_random_numbers():
    state = torch.get_rng_state()
    verify_packing(small_config("bert"))
    assert torch.equal(torch.get_rng_state(), state)


class OperationCounter(TorchDispatchMode):
    """Mode that counts all operations, as a trace would record them."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("no_cached_results")
def test_check_is_hidden_from_active_modes():
    config = small_config("bert")
    counter = OperationCounter()
    with counter, torch.device("meta"):
        assert verify_packing(config) == Packing()
    assert counter.operations == 0


def _unpacked(batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch of the same documents, each in a sequence of its own."""
    width = batch.ids_BS.shape[1]
    starts_N = batch.starts_N.long()
    ids_T = batch.ids_BS.flatten()
    ids_NS = torch.zeros(len(starts_N), width, dtype=batch.ids_BS.dtype)
    for number, (start, tokens) in enumerate(
        zip(starts_N.tolist(), batch.tokens_N.tolist(), strict=True)
    ):
        ids_NS[number, :tokens] = ids_T[start : start + tokens]
    predicted_P = batch.predicted_P.long()
    document_P = torch.searchsorted(starts_N, predicted_P, right=True) - 1
    index_P = predicted_P - starts_N[document_P]
    return MicroBatch.from_samples(
        ids_NS.numpy(),
        starts_N=(torch.arange(len(starts_N)) * width).numpy(),
        tokens_N=batch.tokens_N.long().numpy(),
        predicted_P=(document_P * width + index_P).numpy(),
        targets_P=batch.targets_P.numpy(),
        fixed_slots=None,
    )


@pytest.fixture
def check_packed_documents(dataset, monkeypatch) -> Callable[..., None]:
    """Return a function that compares a step of packed documents with padded ones."""

    def check(family: str, *, kind: str, precision: str, **tolerances: float) -> None:
        config = config_of(family, precision=precision)
        batches = micro_batches(dataset, config)
        if kind == "varlen":
            choose_varlen(monkeypatch)
        packed = training_of(config, dataset)
        assert packed.module.attention.kind == kind
        learned_packed = loss_and_gradients(packed, batches)

        monkeypatch.setattr(
            "trainer.build.choose_attention",
            lambda *_: ChosenAttention(kind="row", reason="test"),
        )
        padded_batches = [_unpacked(batch) for batch in batches]
        sequences = len(padded_batches[0].ids_BS)
        padded_config = config.model_copy(
            update={
                "layout": "padded",
                "micro_batch_size": sequences,
                "global_batch_size": sequences,
            }
        )
        padded = training_of(padded_config, dataset)
        assert_gradients_agree(
            loss_and_gradients(padded, padded_batches), learned_packed, **tolerances
        )

    return check


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(
            ("esm", "eurobert", "distilbert", "electra"), ("sdpa", "varlen")
        ),
        ("megatron-bert", "sdpa"),
    ],
)
def test_packed_documents_learn_as_padded(family, kind, check_packed_documents):
    # Sums over sequences are in another order.
    check_packed_documents(
        family, kind=kind, precision="fp32", loss=1e-6, gradient=1e-5
    )


@pytest.mark.parametrize("family", ["bert", "esm"])
def test_packed_documents_learn_as_padded_in_bf16(family, check_packed_documents):
    # Gradients differ by a few roundings to bf16, each up to 2**-8 = 0.4 %.
    check_packed_documents(
        family, kind="sdpa", precision="bf16", loss=1e-3, gradient=2e-2
    )
