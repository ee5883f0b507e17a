"""Attention operators that only GPUs have, without dropout."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
ATTENTION = {
    name + end for name in (*_NAMES, "_varlen_attn") for end in ("", "_backward")
}
_ELSEWHERE = ThreadPoolExecutor(1)
"""Below autograd, where operators are dispatched, a thread has none; another has."""


def attention(name: str, named: dict[str, Any]) -> list[torch.Tensor]:
    """Return the first outputs of an attention operator, or of its backward.

    ``arguments`` are by name.
    """
    leaves = [named[key].detach().float() for key in ("query", "key", "value")]
    if not name.endswith("_backward"):
        return [_forward(name, named, *leaves)]
    given = named["grad_out"] if "grad_out" in named else named["grad_out_"]

    def gradients() -> list[torch.Tensor]:
        inputs = [leaf.requires_grad_() for leaf in leaves]
        return list(
            torch.autograd.grad(_forward(name, named, *inputs), inputs, given.float())
        )

    return _ELSEWHERE.submit(gradients).result()


def _forward(
    name: str, named: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    if named.get("dropout_p"):
        raise NotImplementedError(f"values of {name} with dropout")
    if "varlen" not in name:
        mask = named.get("attn_bias")
        mask = None if mask is None else mask.float()
        return scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            is_causal=bool(named.get("is_causal")),
            scale=named.get("scale"),
        )
    documents = []
    edges_q, edges_k = named["cu_seq_q"].tolist(), named["cu_seq_k"].tolist()
    for from_q, to_q, from_k, to_k in zip(
        edges_q, edges_q[1:], edges_k, edges_k[1:], strict=False
    ):
        parts = (q[from_q:to_q], k[from_k:to_k], v[from_k:to_k])
        mask = _window(to_q - from_q, to_k - from_k, named.get("window_size"))
        document_q, document_k, document_v = (part.transpose(0, 1) for part in parts)
        output = scaled_dot_product_attention(
            document_q, document_k, document_v, mask, scale=named.get("scale")
        )
        documents.append(output.transpose(0, 1))
    documents.append(q[edges_q[-1] :] * 0)  # padding behind the last document
    return torch.cat(documents)


def _window(queries: int, keys: int, size: list[int] | None) -> torch.Tensor | None:
    if not size or max(size) < 0:
        return None
    away = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    return torch.zeros(queries, keys).masked_fill_(
        (away < -size[0]) | (away > size[1]), float("-inf")
    )
