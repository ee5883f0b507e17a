"""Sparse last layer: queries and MLP only for masked tokens.

Keys and values at all positions, so the loss is the same.

Shapes: B sequences, S positions of a sequence, T = B * S query tokens, U key tokens, N
documents, D hidden, H heads, E dimensions of a head, K slots of the MLM head, R slots
of a sequence.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from trainer.model.families import LayerLayout
from trainer.model.precision import project

_UNSPLIT: dict[str, Any] = (
    {"num_splits": 1}
    if "num_splits" in inspect.signature(varlen_attn).parameters
    else {}
)
"""Keeps FlashAttention 3 from splitting keys of long sequences, with fp32 results of
each part; not in torch 2.11."""


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
) -> torch.Tensor:
    """Return attention within each document; shape (T, H, E).

    Edges, shape (N + 1,), int32, are the starts of each document's queries, or keys and
    values, and the last one's end; no document has more than ``max_query_length`` and
    ``max_key_length`` of them. ``window_tokens`` is the reach of attention to either side,
    None for the whole document; ``scale`` None means E ** -0.5.
    """
    # Without a window torch >= 2.14 chooses cuDNN on Hopper and Blackwell, whose
    # backward takes a dense workspace of N x max_query_length x H x E x 4 bytes: 35 GB for
    # 946 packed sequences of BERT-large. A window that no document exceeds has no
    # effect in FlashAttention, but cuDNN does not support it. FlashAttention 3 compares
    # it with queries too, and else moves it by the difference of queries and keys.
    reach = (
        max(max_query_length, max_key_length)
        if window_tokens is None
        else window_tokens
    )
    named = scale is not None and not math.isclose(scale, query_THE.shape[-1] ** -0.5)
    attended = varlen_attn(
        query_THE,
        key_UHE,
        value_UHE,
        query_edges,
        key_edges,
        max_query_length,
        max_key_length,
        window_size=(reach, reach),
        scale=scale if named else None,
        **(_UNSPLIT if current_flash_attention_impl() == "FA3" else {}),
    )
    assert isinstance(attended, torch.Tensor)
    return attended


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceQueries:
    """Query positions for attention over whole sequences under a mask."""

    position_K: torch.Tensor
    """Positions in the flattened sequences, int64; any position in unused slots."""
    slot_K: torch.Tensor
    """Index of each position among B * R slots, int64; unused ones go to one more slot
    behind these."""
    mask_BRS: torch.Tensor
    """Additive mask, shape (B, 1, R, S)."""

    def attend(
        self,
        query_KHE: torch.Tensor,
        key_BSHE: torch.Tensor,
        value_BSHE: torch.Tensor,
        *,
        dropout: float,
    ) -> torch.Tensor:
        """Return attention of the query positions over their documents.

        Shape (K, H, E).
        """
        rows, _, slots, _ = self.mask_BRS.shape
        spread = query_KHE.new_zeros((rows * slots + 1, *query_KHE.shape[1:]))
        query_BRHE = spread.index_copy(0, self.slot_K, query_KHE)[:-1].unflatten(
            0, (rows, slots)
        )
        attended_BHRE = functional.scaled_dot_product_attention(
            query_BRHE.transpose(1, 2),
            key_BSHE.transpose(1, 2),
            value_BSHE.transpose(1, 2),
            attn_mask=self.mask_BRS,
            dropout_p=dropout,
        )
        attended = functional.pad(
            attended_BHRE.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1)
        )
        return attended.index_select(0, self.slot_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentQueries:
    """Query positions for attention document by document."""

    position_K: torch.Tensor
    """Positions in the flattened sequences, int64, ascending."""
    query_edges: torch.Tensor
    """Number of query positions before each of ``key_edges``, int32."""
    key_edges: torch.Tensor
    """Edges of documents in the flattened sequences, int32."""
    max_query_length: int
    max_key_length: int

    def attend(
        self,
        query_KHE: torch.Tensor,
        key_BSHE: torch.Tensor,
        value_BSHE: torch.Tensor,
        *,
        dropout: float,
    ) -> torch.Tensor:
        """Return attention of the query positions over their documents.

        Shape (K, H, E).
        """
        assert not dropout, "varlen does not support dropout"
        return attend_documents(
            query_KHE,
            key_BSHE.flatten(0, 1),
            value_BSHE.flatten(0, 1),
            query_edges=self.query_edges,
            key_edges=self.key_edges,
            max_query_length=self.max_query_length,
            max_key_length=self.max_key_length,
        )


LastLayerQueries = SequenceQueries | DocumentQueries


def make_sparse_layer(layer: nn.Module, layout: LayerLayout) -> None:
    """Let a full-attention layer compute query positions only, if its forward gets them as ``asked``."""
    answer = _bert_answer if layout == "bert" else _modernbert_answer
    # On the instance: names of parameters and what transformers saves stay as they are.
    layer.forward = functools.partial(_forward, layer, answer)


def _forward(
    layer: Any,
    answer: Callable[..., torch.Tensor],
    hidden_BSD: torch.Tensor,
    *others: Any,
    asked: LastLayerQueries | None = None,
    **more: Any,
) -> Any:
    if asked is None:
        return type(layer).forward(layer, hidden_BSD, *others, **more)
    narrow = functools.partial(
        answer, layer, asked, position_embeddings=more.get("position_embeddings")
    )
    # transformers checkpoints activations in the forward that is replaced here; earlier
    # ones did in ``__call__``.
    if (
        layer.gradient_checkpointing
        and layer.training
        and type(layer).__call__ is nn.Module.__call__
    ):
        return layer._gradient_checkpointing_func(narrow, hidden_BSD)
    return narrow(hidden_BSD)


def _bert_answer(
    layer: Any,
    asked: LastLayerQueries,
    hidden_BSD: torch.Tensor,
    *,
    position_embeddings: None,  # BERT adds its positions to the embeddings
) -> torch.Tensor:
    attention = layer.attention.self
    heads = (-1, attention.attention_head_size)
    asked_KD = hidden_BSD.flatten(0, 1).index_select(0, asked.position_K)
    attended_KHE = asked.attend(
        attention.query(asked_KD).unflatten(-1, heads),
        attention.key(hidden_BSD).unflatten(-1, heads),
        attention.value(hidden_BSD).unflatten(-1, heads),
        dropout=attention.dropout.p if layer.training else 0.0,
    )
    answered_KD = layer.attention.output(attended_KHE.flatten(1, 2), asked_KD)
    fed_KD: torch.Tensor = layer.feed_forward_chunk(answered_KD)
    return fed_KD.unsqueeze(0)


def _modernbert_answer(
    layer: Any,
    asked: LastLayerQueries,
    hidden_BSD: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    attention = layer.attn
    heads, hidden = (-1, attention.head_dim), hidden_BSD.shape[-1]
    normed_BSD = layer.attn_norm(hidden_BSD)
    asked_normed_KD = normed_BSD.flatten(0, 1).index_select(0, asked.position_K)
    query_KD = project(attention.Wqkv, asked_normed_KD, slice(hidden))
    key_BSD, value_BSD = project(attention.Wqkv, normed_BSD, slice(hidden, None)).chunk(
        2, dim=-1
    )
    cos_BSE, sin_BSE = (
        table.expand(*hidden_BSD.shape[:2], -1) for table in position_embeddings
    )
    cos_KE, sin_KE = (
        table.flatten(0, 1).index_select(0, asked.position_K)
        for table in (cos_BSE, sin_BSE)
    )
    attended_KHE = asked.attend(
        _rotated(query_KD.unflatten(-1, heads), cos_KE, sin_KE),
        _rotated(key_BSD.unflatten(-1, heads), cos_BSE, sin_BSE),
        value_BSD.unflatten(-1, heads),
        dropout=attention.attention_dropout if layer.training else 0.0,
    )
    asked_KD = hidden_BSD.flatten(0, 1).index_select(0, asked.position_K)
    answered_KD = asked_KD + attention.out_drop(
        attention.Wo(attended_KHE.flatten(1, 2))
    )
    fed_KD: torch.Tensor = answered_KD + layer.mlp(layer.mlp_norm(answered_KD))
    return fed_KD.unsqueeze(0)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions (Su et al. 2021), halves of a head as the two coordinates.

    Shapes (…, H, E), (…, E).
    """
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads.float() * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(
        heads.dtype
    )
