"""Attention document by document, in one kernel of FlashAttention ("varlen").

All sequences of a micro-batch are one long sequence here, whose documents are given by
their edges.

Shapes: T query tokens, U key tokens, N documents, P parts, H heads, E dimensions of a
head, D features; B and S are the batch of one sequence and its length, as transformers
passes them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from trainer.model.flash_attention import Segments, attend_joined, parts_of
from trainer.model.varlen_kernels import VarlenKernels
from trainer.model.working_copies import take_joined

VARLEN_NAME = "varlen_documents"
"""Name under which transformers knows our attention function."""


def attend_documents(
    joined: Sequence[torch.Tensor],
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
        joined: Queries, keys and values of all documents, as ``attend_joined`` takes
            them.
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
    if scale is not None and math.isclose(scale, joined[0].shape[-1] ** -0.5):
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
        return attend_joined(joined, segments, kernels)
    reach = window_tokens
    if reach is None:
        reach = _reach_beyond_documents(max_query_length, max_key_length)
    query_THE, key_UHE, value_UHE = parts_of(joined)
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
    attended_THE = attend(
        _join(module, query_BHSE, key_BHSE, value_BHSE),
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


def _join(module: nn.Module, *separate_BHSE: torch.Tensor) -> list[torch.Tensor]:
    """Return query, key and value of one long sequence, joined as far as they are.

    Args:
        module: The attention. Its layers keep joined results only if it passes these
            on as they are (``keep_joined``).
        *separate_BHSE: Query, key and value.
    """
    separate = [
        tensor.squeeze(0).transpose(0, 1).unsqueeze(1) for tensor in separate_BHSE
    ]
    for first, name in enumerate(("query", "key")):
        joined_BSD = take_joined(getattr(module, name, None))
        if joined_BSD is not None:
            return [*separate[:first], unjoin_heads(joined_BSD, separate[0])]
    return separate


def unjoin_heads(joined_BSD: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the joined results of linear layers by part and head.

    Args:
        joined_BSD: Results, whose last dimension has the features of all parts.
        like: Tensor whose last two dimensions are H and E.

    Returns:
        A view, shape (B * S, P, H, E).
    """
    shape = (-1, *like.shape[-2:])
    by_part: torch.Tensor = joined_BSD.flatten(0, 1).unflatten(-1, shape)
    return by_part
