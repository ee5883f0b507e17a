"""Attention document by document, in one kernel of FlashAttention ("varlen").

All sequences of a micro-batch are one long sequence here, whose documents are given by
their edges.

Shapes: T query tokens, U key tokens, N documents, H heads, E dimensions of a head; B
and S are the batch of one sequence and its length, as transformers passes them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from trainer.model.flash_attention import Segments, attend_joined
from trainer.model.varlen_kernels import VarlenKernels

VARLEN_NAME = "varlen_documents"
"""Name under which transformers knows our attention function."""


def attend_documents(
    query_THE: torch.Tensor,
    key_UHE: torch.Tensor,
    value_UHE: torch.Tensor,
    *,
    query_edges: torch.Tensor,
    key_edges: torch.Tensor,
    max_query_length: int,
    max_key_length: int,
    window_tokens: int | None = None,
    scale: float | None = None,
    kernels: VarlenKernels | None = None,
) -> torch.Tensor:
    """Return attention within each document; shape (T, H, E).

    Args:
        query_THE: Queries of all documents.
        key_UHE: Keys of all documents.
        value_UHE: Values of all documents.
        query_edges: Start of each document's queries, and the end of the last one's,
            shape (N + 1,), int32.
        key_edges: Start of each document's keys and values, and the end of the last
            one's, shape (N + 1,), int32.
        max_query_length: Upper bound of the queries of a document.
        max_key_length: Upper bound of the keys of a document.
        window_tokens: Reach of attention to either side; None for the whole document.
        scale: Factor of the scores; None means E ** -0.5.
        kernels: Kernels of forward and backward; None for torch's varlen attention.
    """
    # transformers passes the kernels' own default, which they compute from None.
    if scale is not None and math.isclose(scale, query_THE.shape[-1] ** -0.5):
        scale = None
    if kernels is not None:
        segments = Segments(
            query_edges=query_edges,
            key_edges=key_edges,
            max_query_length=max_query_length,
            max_key_length=max_key_length,
            window_tokens=window_tokens,
            scale=scale,
        )
        parts = [tensor.unsqueeze(1) for tensor in (query_THE, key_UHE, value_UHE)]
        return attend_joined(parts, segments, kernels)
    reach = window_tokens
    if reach is None:
        reach = _reach_beyond_documents(max_query_length, max_key_length)
    attended_THE = varlen_attn(
        query_THE,
        key_UHE,
        value_UHE,
        query_edges,
        key_edges,
        max_query_length,
        max_key_length,
        window_size=(reach, reach),
        scale=scale,
    )
    assert isinstance(attended_THE, torch.Tensor)
    return attended_THE


def _reach_beyond_documents(max_query_length: int, max_key_length: int) -> int:
    """Return the reach of a window that no document exceeds.

    Without a window torch >= 2.14 chooses cuDNN on Hopper and Blackwell, whose backward
    takes a dense workspace of N x max_query_length x H x E x 4 bytes: 35 GB for 946
    packed sequences of BERT-large. Such a window has no effect in FlashAttention, but
    cuDNN does not support it.
    """
    # The last layer has fewer queries than keys, whose difference moves the window.
    return max(max_query_length, max_key_length)


def attend_within_documents(
    module: nn.Module,
    query_BHSE: torch.Tensor,
    key_BHSE: torch.Tensor,
    value_BHSE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    varlen_kernels: VarlenKernels | None = None,
    attend: Callable[..., torch.Tensor] = attend_documents,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention within documents of one long sequence, shape (1, T, H, E).

    The signature is that of attention functions in transformers.

    Raises:
        ValueError: If there is dropout or a mask.
    """
    if dropout or attention_mask is not None:
        raise ValueError("varlen attention supports neither dropout nor masks")
    # Grouped queries share keys and values.
    heads_per_key = query_BHSE.shape[1] // key_BHSE.shape[1]
    if heads_per_key > 1:
        key_BHSE = key_BHSE.repeat_interleave(heads_per_key, 1)
        value_BHSE = value_BHSE.repeat_interleave(heads_per_key, 1)
    query_THE, key_THE, value_THE = (
        tensor.squeeze(0).transpose(0, 1)
        for tensor in (query_BHSE, key_BHSE, value_BHSE)
    )
    attended_THE = attend(
        query_THE,
        key_THE,
        value_THE,
        query_edges=cu_seq_lens_q,
        key_edges=cu_seq_lens_q,
        max_query_length=max_length_q,
        max_key_length=max_length_q,
        scale=scaling,
        # transformers counts the token itself.
        window_tokens=None if sliding_window is None else sliding_window - 1,
        kernels=varlen_kernels,
    )
    return attended_THE.unsqueeze(0), None
