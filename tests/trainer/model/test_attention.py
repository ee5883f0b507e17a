"""Attention within documents, under a mask and by varlen kernels."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.trainer.gradients import (
    assert_gradients_agree,
    loss_and_gradients,
    loss_and_gradients_of_first_step,
)
from tests.trainer.masked_attention import choose_varlen
from tests.trainer.tiny_models import FAMILIES, config_of, micro_batches, training_of
from trainer.data.micro_batch import MicroBatch
from trainer.formats.manifest import SpecialIds
from trainer.model.attention import choose_attention
from trainer.model.encoder import build_model
from trainer.model.encoder_config import build_config
from trainer.model.masked_lm import MaskedLM
from trainer.model.varlen import VARLEN_NAME, attend_within_documents
from trainer.model.verify_packing import verify_packing

META = torch.device("meta")
MASKED_TOLERANCE = 1e-5
"""Relative distance of fp32 gradients from those of attention under a mask, whose sums
are over whole sequences."""


def _change_document(batch: MicroBatch, number: int) -> MicroBatch:
    """Return the micro-batch with other ids for all tokens of one document."""
    start = int(batch.starts_N[number])
    end = start + int(batch.tokens_N[number])
    changed = dataclasses.replace(
        batch, tensors=batch.tensors.moved(torch.Tensor.clone)
    )
    # Each id's successor, which is one of the 128 ids too.
    ids_T = changed.ids_BS.flatten()
    ids_T[start:end] = ((ids_T[start:end].long() + 1) % 128).to(torch.uint16)
    return changed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["sdpa", "varlen", "fa4"])
def test_document_influences_itself_only(family, kind, dataset, monkeypatch):
    if kind != "sdpa":
        choose_varlen(monkeypatch, kind)
    # A dense head gives the logits of all positions.
    config = config_of(
        family, mlm_head="dense", micro_batch_size=2, global_batch_size=2
    )
    module = training_of(config, dataset).module
    module.eval()
    assert module.attention.kind == kind
    (batch,) = micro_batches(dataset, config)
    changed_batch = _change_document(batch, len(batch.starts_N) // 2)
    is_changed_BS = batch.wide_ids_BS() != changed_batch.wide_ids_BS()
    is_changed_T = is_changed_BS.flatten()

    with torch.no_grad():
        before_TV, _ = module._predict(batch)
        after_TV, _ = module._predict(changed_batch)

    # Logits of other documents stay the same, to the last bit.
    assert torch.equal(before_TV[~is_changed_T], after_TV[~is_changed_T])
    # All logits of the document change, so the test sees its influence.
    difference_TV = (before_TV - after_TV)[is_changed_T].abs()
    assert (difference_TV.amax(dim=1) > 0).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["packed", "padded", "bucketed"])
@pytest.mark.parametrize("last_layer", ["sparse", "dense"])
@pytest.mark.parametrize("kind", ["varlen", "fa4"])
def test_varlen_learns_as_masked_sequences_do(
    family, layout, last_layer, kind, dataset, monkeypatch
):
    config = config_of(family, layout=layout, last_layer=last_layer)
    expected = loss_and_gradients_of_first_step(config, dataset)
    choose_varlen(monkeypatch, kind)
    assert_gradients_agree(
        loss_and_gradients_of_first_step(config, dataset),
        expected,
        gradient=MASKED_TOLERANCE,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_varlen_step_traces_on_meta_device(family, dataset):
    batch = micro_batches(dataset, config_of())[0]
    config = config_of(family, precision="bf16", device="cuda", compile=False)
    model_config = build_config(
        config.model,
        vocab_size=128,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
        seq_length_tokens=64,
        attention_dropout=0.0,
    )
    chosen = choose_attention(config, model_config, META, verify_packing(model_config))
    assert chosen.kind == "varlen"
    model = build_model(model_config, META, VARLEN_NAME).to(torch.bfloat16)
    loss = MaskedLM(model, config, chosen)(batch.to(META))
    loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_varlen_rejects_dropout():
    tensor_BHSE = torch.empty(1, 2, 8, 16, device=META)
    edges = torch.empty(2, dtype=torch.int32, device=META)
    with pytest.raises(ValueError, match="neither dropout nor masks"):
        attend_within_documents(
            torch.nn.Module(),
            query_BHSE=tensor_BHSE,
            key_BHSE=tensor_BHSE,
            value_BHSE=tensor_BHSE,
            attention_mask=None,
            cu_seq_lens_q=edges,
            max_length_q=8,
            dropout=0.1,
        )


def _add_empty_sequences(batch: MicroBatch, sequences: int) -> MicroBatch:
    """Return the micro-batch with more sequences, which are padding only."""
    return MicroBatch.from_samples(
        np.pad(batch.ids_BS.numpy(), ((0, sequences), (0, 0))),
        starts_N=batch.starts_N.long().numpy(),
        tokens_N=batch.tokens_N.long().numpy(),
        predicted_P=batch.predicted_P.long().numpy(),
        targets_P=batch.targets_P.numpy(),
        fixed_slots=None,
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [("bert", "packed"), ("bert", "padded"), ("modernbert", "packed")],
)
@pytest.mark.parametrize("kind", ["varlen", "fa4"])
def test_sequences_and_documents_without_tokens_add_nothing(
    family, layout, kind, dataset, monkeypatch
):
    # So few tokens are masked that most documents have no query in the last layer.
    config = config_of(family, layout=layout, masking_probability=0.02)
    with_mask = training_of(config, dataset)
    choose_varlen(monkeypatch, kind)
    by_document = training_of(config, dataset)
    batches = micro_batches(dataset, config, steps=3)
    for empty_sequences, batch in enumerate(batches):
        batch_with_empty_sequences = _add_empty_sequences(batch, empty_sequences)
        assert_gradients_agree(
            loss_and_gradients(by_document, [batch_with_empty_sequences]),
            loss_and_gradients(with_mask, [batch_with_empty_sequences]),
            gradient=MASKED_TOLERANCE,
        )


@pytest.mark.parametrize(
    ("document_tokens", "kernels"),
    [(20, ("fa2", "fa2")), (200, ("fa2", "fa4")), (500, ("fa4", "fa4"))],
)
def test_first_micro_batch_fixes_kernels(
    document_tokens, kernels, dataset, monkeypatch
):
    config = config_of()
    choose_varlen(monkeypatch, "fa4")
    module = training_of(config, dataset).module
    (batch, *_) = micro_batches(dataset, config)
    # The mean of documents follows from the tokens of all.
    tokens = document_tokens * len(batch.starts_N)
    for tokens_of_batch in (tokens, 1):
        module._predict(dataclasses.replace(batch, non_padding_tokens=tokens_of_batch))
        chosen = module.varlen_kernels
        assert (chosen.forward, chosen.backward) == kernels
