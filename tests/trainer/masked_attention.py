"""Attention under a mask, in place of the varlen kernels that a CPU lacks."""

import dataclasses
from typing import Literal

import pytest
import torch
from torch.nn import functional

from tests.trainer.reference_kernels import use_reference_kernels
from trainer.model.attention import choose_attention


def attend_within_edges(
    query_THE,
    key_THE,
    value_THE,
    query_edges,
    key_edges,
    max_query_length,
    max_key_length,
    *,
    scale=None,
    window_size,
):
    """Compute attention within documents under a mask, in place of a varlen kernel.

    Its arguments are those of torch's ``varlen_attn``, and it is compiled once for all
    numbers of documents. Like the kernels, it requires that the edges of documents
    cover all positions, and that no document exceeds the maximum lengths.

    Shapes: T queries and U keys, H heads, E elements of a head.
    """
    if not torch.compiler.is_compiling():
        _check_edges(query_edges, len(query_THE), max_query_length)
        _check_edges(key_edges, len(key_THE), max_key_length)
    query_document_T = _document_of_position(query_edges, len(query_THE))
    key_document_U = _document_of_position(key_edges, len(key_THE))
    is_allowed_TU = query_document_T[:, None] == key_document_U
    reach = window_size[0]
    if 0 <= reach < max_key_length:
        # Only the sparse last layer has fewer queries than keys, and it has no window.
        position_U = torch.arange(len(key_THE))
        distance_UU = (position_U[:, None] - position_U).abs()
        is_allowed_TU = is_allowed_TU & (distance_UU <= reach)
    query_HTE, key_HUE, value_HUE = (
        tensor.transpose(0, 1) for tensor in (query_THE, key_THE, value_THE)
    )
    return functional.scaled_dot_product_attention(
        query_HTE, key_HUE, value_HUE, attn_mask=is_allowed_TU, scale=scale
    ).transpose(0, 1)


def choose_varlen(
    monkeypatch: pytest.MonkeyPatch, kind: Literal["varlen", "fa4"] = "varlen"
) -> None:
    """Let trainings use attention within documents, without its kernels."""
    monkeypatch.setattr("trainer.model.varlen.varlen_attn", attend_within_edges)
    use_reference_kernels(monkeypatch)

    def choose(*arguments):
        return dataclasses.replace(choose_attention(*arguments), kind=kind)

    monkeypatch.setattr("trainer.build.choose_attention", choose)


def _check_edges(edges, positions: int, max_length: int) -> None:
    """Assert that documents cover all positions, and that their lengths are valid."""
    assert (int(edges[0]), int(edges[-1])) == (0, positions)
    lengths = edges.diff()
    assert 0 <= int(lengths.min()) <= int(lengths.max()) <= max_length


def _document_of_position(edges, positions: int) -> torch.Tensor:
    """Return the number of the document, counted from 1, that has each position."""
    position_T = torch.arange(positions, dtype=edges.dtype)
    return torch.searchsorted(edges, position_T, right=True)
