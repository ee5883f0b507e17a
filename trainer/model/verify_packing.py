"""Verification that documents can share a sequence.

A small copy of an encoder computes two documents packed, and each alone.

Shapes: T tokens of all documents, H heads, E dimensions of a head, K positions
given to the head.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from trainer.data.micro_batch import MicroBatch
from trainer.model.attention import AttentionKind, CannotBePacked, Packing
from trainer.model.encoder import head_inputs
from trainer.model.encoder_config import window_tokens
from trainer.model.encoder_inputs import encoder_inputs
from trainer.model.flash_attention import parts_of
from trainer.model.probe import (
    MODEL_ERRORS,
    Ids,
    NoSmallCopy,
    ProbeDocuments,
    check_small_copy,
    is_close,
    logits_alone,
    probe_documents,
    summarise,
)
from trainer.model.varlen import attend_within_documents

_ATTENTION_NAME = "documents_of_probe"
"""Name under which transformers knows the attention function of this check."""


def verify_packing(config: PretrainedConfig) -> Packing | CannotBePacked:
    """Return how an architecture takes packed sequences, or the reason why it cannot.

    The logits of packed documents must equal those of each document alone, with its
    padding mask as transformers builds it, and must not change by a single bit if all
    tokens of the other document do.
    """
    try:
        return check_small_copy(_check_packing, config)
    except NoSmallCopy as error:
        return CannotBePacked(reason=str(error))


@torch.no_grad()
def _check_packing(model: PreTrainedModel) -> Packing | CannotBePacked:
    """Return the result of ``verify_packing`` for a small copy."""
    AttentionInterface.register(
        _ATTENTION_NAME,
        functools.partial(attend_within_documents, attend=_attend_plainly),
    )
    documents = probe_documents(model.config)
    expected = torch.cat(
        [logits_alone(model, documents.first), logits_alone(model, documents.second)]
    )
    reasons: list[str] = []
    for packing in _possible_packings(model.config):
        reason = _reason_against(model, "sdpa", packing, documents, expected)
        if reason is None:
            # Not with ``set_attn_implementation``, which warns about models that ignore
            # it: the comparison finds these.
            model.config._attn_implementation = _ATTENTION_NAME
            no_varlen_reason = _reason_against(
                model, "varlen", packing, documents, expected
            )
            return replace(packing, no_varlen_reason=no_varlen_reason)
        reasons.append(reason)
    # The usual way was tried first, so this is the reason against it.
    return CannotBePacked(reason=reasons[0])


def _possible_packings(config: PretrainedConfig) -> Iterator[Packing]:
    """Yield the ways in which architectures take packed sequences, usual ones first."""
    for needs_embeddings in (False, True):
        for first_position in (0, config.pad_token_id + 1):
            yield Packing(
                first_position=first_position, needs_embeddings=needs_embeddings
            )


def _reason_against(
    model: PreTrainedModel,
    kind: AttentionKind,
    packing: Packing,
    documents: ProbeDocuments,
    expected: torch.Tensor,
) -> str | None:
    """Return the reason why packed documents cannot be computed this way.

    Args:
        model: The small copy.
        kind: Kind of attention.
        packing: How the copy is given packed sequences.
        documents: The documents.
        expected: Logits of ``first`` and ``second``, each computed alone, joined.

    Returns:
        The reason, or None if they can.
    """
    packed_logits = functools.partial(_packed_logits, model, kind, packing)
    try:
        packed = packed_logits(documents.first, documents.second)
        beside_other_second = packed_logits(documents.first, documents.other_second)
        behind_other_first = packed_logits(documents.other_first, documents.second)
    except MODEL_ERRORS as error:
        return f"it does not take the bounds of documents ({summarise(error)})"
    first_tokens = len(documents.first)
    # The logits of each document, beside another one in place of its neighbour.
    beside_others = torch.cat(
        [beside_other_second[:first_tokens], behind_other_first[first_tokens:]]
    )
    if not torch.equal(beside_others, packed):
        return "packed documents influence each other"
    if not is_close(packed, expected):
        return "packed documents have other logits than each alone"
    return None


def _packed_logits(
    model: PreTrainedModel,
    kind: AttentionKind,
    packing: Packing,
    first: Ids,
    second: Ids,
) -> torch.Tensor:
    """Return the logits of two packed documents, through a sparse head."""
    tokens = len(first) + len(second)
    padding = [model.config.pad_token_id] * 2
    ids_BS = np.array([[*first, *second, *padding]])
    batch = MicroBatch.from_samples(
        ids_BS,
        starts_N=np.array([0, len(first)]),
        tokens_N=np.array([len(first), len(second)]),
        predicted_P=np.arange(tokens),
        targets_P=ids_BS[0, :tokens],
        fixed_slots=None,
    )
    inputs = encoder_inputs(
        batch,
        kind,
        packing,
        model,
        dtype=torch.float32,
        window_tokens=window_tokens(model.config),
    )
    with head_inputs(model, batch.slot_position_K):
        logits: torch.Tensor = model(**inputs.arguments).logits
    return logits[0]


def _attend_plainly(
    joined: Sequence[torch.Tensor],
    *,
    query_edges: torch.Tensor,
    window_tokens: int | None,
    scale: float | None,
    **_: object,
) -> torch.Tensor:
    """Replace ``attend_documents`` on a CPU, by attention under a mask."""
    query_THE, key_THE, value_THE = parts_of(joined)
    position_T = torch.arange(len(query_THE))
    document_T = torch.searchsorted(query_edges.long(), position_T, right=True)
    reach = len(query_THE) if window_tokens is None else window_tokens
    is_same_document_TT = document_T[:, None] == document_T
    is_near_TT = (position_T[:, None] - position_T).abs() <= reach
    query_HTE, key_HTE, value_HTE = (
        tensor.transpose(0, 1) for tensor in (query_THE, key_THE, value_THE)
    )
    return functional.scaled_dot_product_attention(
        query_HTE, key_HTE, value_HTE, is_same_document_TT & is_near_TT, scale=scale
    ).transpose(0, 1)
