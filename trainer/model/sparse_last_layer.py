"""Sparse last layer: queries and MLP only for the tokens to predict.

Keys and values are computed at all positions, so the loss is the same.

Shapes: B sequences, S positions of a sequence, D hidden, H heads, E dimensions of a
head, K slots of the MLM head.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.formats.families import LayerLayout
from trainer.model.last_layer_queries import LastLayerQueries
from trainer.model.working_copies import project, take_joined


def make_sparse_layer(layer: nn.Module, layout: LayerLayout) -> None:
    """Let a full-attention layer compute query positions only.

    The layer does so if its forward gets them as ``last_layer_queries``.
    """
    compute = _compute_bert_layer if layout == "bert" else _compute_modernbert_layer
    # On the instance, as a wrapper would change the names of parameters, and with them
    # checkpoints and what transformers saves.
    layer.forward = functools.partial(_forward, layer, compute)


def _forward(
    layer: Any,
    compute: Callable[..., torch.Tensor],
    hidden_BSD: torch.Tensor,
    *arguments: Any,
    last_layer_queries: LastLayerQueries | None = None,
    **options: Any,
) -> Any:
    """Compute a layer at its query positions; without them, as transformers does.

    Args:
        layer: The layer.
        compute: Function that computes it at its query positions.
        hidden_BSD: Input of the layer.
        *arguments: Other arguments of the layer's own forward.
        last_layer_queries: The query positions, if any.
        **options: Keyword arguments of the layer's own forward.
    """
    if last_layer_queries is None:
        return type(layer).forward(layer, hidden_BSD, *arguments, **options)
    compute_queries = functools.partial(
        compute,
        layer,
        last_layer_queries,
        position_embeddings=options.get("position_embeddings"),
    )
    # transformers checkpoints activations in the forward that is replaced here. Its
    # earlier versions do so in a ``__call__`` of their own, which has run already.
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
    hidden_KD = _at_queries(hidden_BSD, queries)
    attended_KHE = queries.attend(
        attention.query(hidden_KD).unflatten(-1, head_shape),
        attention.key(hidden_BSD).unflatten(-1, head_shape),
        attention.value(hidden_BSD).unflatten(-1, head_shape),
        dropout=attention.dropout.p if layer.training else 0.0,
        key_value_BSD=take_joined(attention.key),
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
    normed_KD = _at_queries(normed_BSD, queries)
    # The first third of Wqkv makes queries, the others keys and values.
    query_KD = project(attention.Wqkv, normed_KD, slice(hidden_size))
    key_BSD, value_BSD = project(
        attention.Wqkv, normed_BSD, slice(hidden_size, None)
    ).chunk(2, dim=-1)
    cos_BSE, sin_BSE = (
        table.expand(*hidden_BSD.shape[:2], -1) for table in position_embeddings
    )
    cos_KE = _at_queries(cos_BSE, queries)
    sin_KE = _at_queries(sin_BSE, queries)
    attended_KHE = queries.attend(
        _rotate(query_KD.unflatten(-1, head_shape), cos_KE, sin_KE),
        _rotate(key_BSD.unflatten(-1, head_shape), cos_BSE, sin_BSE),
        value_BSD.unflatten(-1, head_shape),
        dropout=attention.attention_dropout if layer.training else 0.0,
    )
    hidden_KD = _at_queries(hidden_BSD, queries)
    attention_KD = hidden_KD + attention.out_drop(
        attention.Wo(attended_KHE.flatten(1, 2))
    )
    result_KD: torch.Tensor = attention_KD + layer.mlp(layer.mlp_norm(attention_KD))
    return result_KD.unsqueeze(0)


def _at_queries(values_BSD: torch.Tensor, queries: LastLayerQueries) -> torch.Tensor:
    """Return the values at the query positions, shape (K, D)."""
    return values_BSD.flatten(0, 1).index_select(0, queries.position_K)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads by their positions (Su et al. 2021).

    The two halves of a head are the two coordinates.

    Args:
        heads: Queries or keys, shape (…, H, E).
        cos: Cosines of the angles of each position, shape (…, E).
        sin: Sines of these angles, shape (…, E).
    """
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (heads.float() * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(
        heads.dtype
    )
