"""Kernels of varlen attention as formulas, in place of those that a CPU lacks.

Backward reads the log-sum-exp, as FlashAttention's does, so that a wrong one gives
wrong gradients.

Shapes: T queries and U keys, H heads, E elements of a head.
"""

import torch

from trainer.model import flash_attention
from trainer.model.flash_attention import KernelFunctions, join_like, parts_of


def attend(query_THE, key_UHE, value_UHE, segments):
    """Return attention and the log-sum-exp of its scores."""
    scores_HTU = _scores(query_THE, key_UHE, segments)
    log_sum_exp_HT = scores_HTU.logsumexp(-1)
    weights_HTU = (scores_HTU - log_sum_exp_HT[..., None]).exp()
    attended_THE = torch.einsum("htu,uhe->the", weights_HTU, value_UHE.double())
    # The log-sum-exp of kernels is in fp32.
    return attended_THE.to(query_THE.dtype).contiguous(), log_sum_exp_HT.float()


def attend_in_order_of_query(query_THE, *arguments):
    """Return the same, with the result in memory as FlashAttention 2's is."""
    attended_THE, log_sum_exp_HT = attend(query_THE, *arguments)
    return torch.empty_like(query_THE).copy_(attended_THE), log_sum_exp_HT


def attend_backward(gradient_THE, joined, attended_THE, log_sum_exp_HT, segments):
    """Write the gradients into parts of the joined ones, as FlashAttention 4 does."""
    gradients = [tensor.new_empty(tensor.shape) for tensor in joined]
    parts = _gradients_of_parts(
        gradient_THE, joined, attended_THE, log_sum_exp_HT, segments
    )
    for gradient, part in zip(parts_of(gradients), parts, strict=True):
        gradient.copy_(part)
    return gradients


def attend_backward_in_order_of_parts(_gradient_THE, joined, *arguments):
    """Join the gradients, as those of FlashAttention 2 are."""
    parts = _gradients_of_parts(_gradient_THE, joined, *arguments)
    return join_like(
        joined,
        [
            torch.empty_like(part).copy_(gradient)
            for part, gradient in zip(parts_of(joined), parts, strict=True)
        ],
    )


def _gradients_of_parts(gradient_THE, joined, attended_THE, log_sum_exp_HT, segments):
    """Return the gradients of query, key and value, in fp64."""
    query, key, value = (part.double() for part in parts_of(joined))
    gradient = gradient_THE.double()
    scores_HTU = _scores(query, key, segments)
    weights_HTU = (scores_HTU - log_sum_exp_HT.double()[..., None]).exp()
    weight_gradients_HTU = torch.einsum("the,uhe->htu", gradient, value)
    sums_HT = (gradient * attended_THE.double()).sum(-1).T
    scale = _scale(query, segments)
    score_gradients_HTU = weights_HTU * (weight_gradients_HTU - sums_HT[..., None])
    return (
        torch.einsum("htu,uhe->the", score_gradients_HTU * scale, key),
        torch.einsum("htu,the->uhe", score_gradients_HTU * scale, query),
        torch.einsum("htu,the->uhe", weights_HTU, gradient),
    )


KERNELS = {
    "fa2": KernelFunctions(
        forward=attend_in_order_of_query, backward=attend_backward_in_order_of_parts
    ),
    "fa4": KernelFunctions(forward=attend, backward=attend_backward),
}


def use_reference_kernels(monkeypatch) -> None:
    """Let both kernels of varlen attention be the formulas."""
    monkeypatch.setattr(flash_attention, "KERNELS", KERNELS)


def _scale(query_THE, segments) -> float:
    if segments.scale is None:
        return query_THE.shape[-1] ** -0.5
    return segments.scale


def _scores(query_THE, key_UHE, segments):
    """Return the scores of all pairs, -inf outside of documents and window."""
    scores_HTU = _scale(query_THE, segments) * torch.einsum(
        "the,uhe->htu", query_THE.double(), key_UHE.double()
    )
    queries, keys = len(query_THE), len(key_UHE)
    query_document_T = _document_of_position(segments.query_edges, queries)
    key_document_U = _document_of_position(segments.key_edges, keys)
    is_allowed_TU = query_document_T[:, None] == key_document_U
    if segments.window_tokens is not None:
        # Only queries of whole documents have a window.
        position_U = torch.arange(keys)
        distance_UU = (position_U[:, None] - position_U).abs()
        is_allowed_TU = is_allowed_TU & (distance_UU <= segments.window_tokens)
    return scores_HTU.masked_fill(~is_allowed_TU, -torch.inf)


def _document_of_position(edges, positions: int) -> torch.Tensor:
    """Return the number of the document, counted from 1, that has each position."""
    assert (int(edges[0]), int(edges[-1])) == (0, positions)
    position_T = torch.arange(positions, dtype=edges.dtype)
    return torch.searchsorted(edges, position_T, right=True)
