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

_UNSPLIT: dict[str, Any] = {}
"""Keeps FlashAttention 3 from splitting keys of long sequences, with fp32 results of
each part; not in torch 2.11."""
if "num_splits" in inspect.signature(varlen_attn).parameters:
    _UNSPLIT["num_splits"] = 1


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

    Args:
        query_THE: Queries of all documents.
        key_UHE: Keys of all documents.
        value_UHE: Values of all documents.
        query_edges: Start of each document's queries, and the last one's end, shape
            (N + 1,), int32.
        key_edges: The same for its keys and values.
        max_query_length: Upper bound of the queries of a document.
        max_key_length: Upper bound of the keys of a document.
        window_tokens: Reach of attention to either side; None for the whole document.
        scale: Factor of the scores; None means E ** -0.5.
    """
    # Without a window torch >= 2.14 chooses cuDNN on Hopper and Blackwell, whose
    # backward takes a dense workspace of N x max_query_length x H x E x 4 bytes: 35 GB
    # for 946 packed sequences of BERT-large. A window that no document exceeds has no
    # effect in FlashAttention, but cuDNN does not support it. FlashAttention 3 compares
    # it with queries too, and else moves it by the difference of queries and keys.
    reach = window_tokens
    if reach is None:
        reach = max(max_query_length, max_key_length)
    default_scale = query_THE.shape[-1] ** -0.5
    if scale is not None and math.isclose(scale, default_scale):
        scale = None
    is_fa3 = current_flash_attention_impl() == "FA3"
    attended = varlen_attn(
        query_THE,
        key_UHE,
        value_UHE,
        query_edges,
        key_edges,
        max_query_length,
        max_key_length,
        window_size=(reach, reach),
        scale=scale,
        **(_UNSPLIT if is_fa3 else {}),
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
        """Return attention of the query positions over their documents; (K, H, E)."""
        sequences, _, slots, _ = self.mask_BRS.shape
        # One more slot takes the queries of unused slots of the head.
        empty = query_KHE.new_zeros((sequences * slots + 1, *query_KHE.shape[1:]))
        query_BRHE = empty.index_copy(0, self.slot_K, query_KHE)[:-1].unflatten(
            0, (sequences, slots)
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
        """Return attention of the query positions over their documents; (K, H, E)."""
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
    """Let a full-attention layer compute query positions only.

    It does if its forward gets them as ``last_layer_queries``.
    """
    compute = _compute_bert_layer if layout == "bert" else _compute_modernbert_layer
    # On the instance: names of parameters and what transformers saves stay as they are.
    layer.forward = functools.partial(_forward, layer, compute)


def _forward(
    layer: Any,
    compute: Callable[..., torch.Tensor],
    hidden_BSD: torch.Tensor,
    *others: Any,
    last_layer_queries: LastLayerQueries | None = None,
    **more: Any,
) -> Any:
    if last_layer_queries is None:
        return type(layer).forward(layer, hidden_BSD, *others, **more)
    compute_queries = functools.partial(
        compute,
        layer,
        last_layer_queries,
        position_embeddings=more.get("position_embeddings"),
    )
    # transformers checkpoints activations in the forward that is replaced here; earlier
    # ones did in ``__call__``.
    if (
        layer.gradient_checkpointing
        and layer.training
        and type(layer).__call__ is nn.Module.__call__
    ):
        return layer._gradient_checkpointing_func(compute_queries, hidden_BSD)
    return compute_queries(hidden_BSD)


def _compute_bert_layer(
    layer: Any,
    queries: LastLayerQueries,
    hidden_BSD: torch.Tensor,
    *,
    position_embeddings: None,  # BERT adds its positions to the embeddings
) -> torch.Tensor:
    """Return the layer's result at the query positions, shape (1, K, D)."""
    attention = layer.attention.self
    head_shape = (-1, attention.attention_head_size)
    hidden_KD = hidden_BSD.flatten(0, 1).index_select(0, queries.position_K)
    attended_KHE = queries.attend(
        attention.query(hidden_KD).unflatten(-1, head_shape),
        attention.key(hidden_BSD).unflatten(-1, head_shape),
        attention.value(hidden_BSD).unflatten(-1, head_shape),
        dropout=attention.dropout.p if layer.training else 0.0,
    )
    attention_KD = layer.attention.output(attended_KHE.flatten(1, 2), hidden_KD)
    result_KD: torch.Tensor = layer.feed_forward_chunk(attention_KD)
    return result_KD.unsqueeze(0)


def _compute_modernbert_layer(
    layer: Any,
    queries: LastLayerQueries,
    hidden_BSD: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the layer's result at the query positions, shape (1, K, D)."""
    attention = layer.attn
    head_shape = (-1, attention.head_dim)
    hidden_size = hidden_BSD.shape[-1]
    normed_BSD = layer.attn_norm(hidden_BSD)
    normed_KD = normed_BSD.flatten(0, 1).index_select(0, queries.position_K)
    # The first third of Wqkv makes queries, the others keys and values.
    query_KD = project(attention.Wqkv, normed_KD, slice(hidden_size))
    key_BSD, value_BSD = project(
        attention.Wqkv, normed_BSD, slice(hidden_size, None)
    ).chunk(2, dim=-1)
    cos_BSE, sin_BSE = (
        table.expand(*hidden_BSD.shape[:2], -1) for table in position_embeddings
    )
    cos_KE, sin_KE = (
        table_BSE.flatten(0, 1).index_select(0, queries.position_K)
        for table_BSE in (cos_BSE, sin_BSE)
    )
    attended_KHE = queries.attend(
        _rotate(query_KD.unflatten(-1, head_shape), cos_KE, sin_KE),
        _rotate(key_BSD.unflatten(-1, head_shape), cos_BSE, sin_BSE),
        value_BSD.unflatten(-1, head_shape),
        dropout=attention.attention_dropout if layer.training else 0.0,
    )
    hidden_KD = hidden_BSD.flatten(0, 1).index_select(0, queries.position_K)
    attention_KD = hidden_KD + attention.out_drop(
        attention.Wo(attended_KHE.flatten(1, 2))
    )
    result_KD: torch.Tensor = attention_KD + layer.mlp(layer.mlp_norm(attention_KD))
    return result_KD.unsqueeze(0)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions (Su et al. 2021), halves of a head as the two coordinates.

    Shapes (…, H, E), (…, E).
    """
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads.float() * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(
        heads.dtype
    )
