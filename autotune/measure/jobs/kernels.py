"""Which attention kernel a device takes, and what kernels allocate within themselves.

Shapes: B rows, H heads, S places of a row that ask, E of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from autotune.measure.jobs.tape import Within

aten = torch.ops.aten

_TILE = 16
"""The efficient kernel reads masks in whole tiles."""
_FLASH_ROWS = 128
"""FlashAttention 2's backward adds gradients of queries up in fp32, in blocks of so many rows for every sequence."""
_SORTED_COPIES = 4
"""Of the ids, 8 bytes each, that an embedding's backward sorts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A call of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None

    @classmethod
    def of(  # noqa: PLR0917 - torch's own order
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "Attention":
        """Read the arguments of a call."""
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            additive = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = additive.masked_fill_(attn_mask.logical_not(), -math.inf)
        return cls(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale)


def attend(asked: Attention, explicit: Callable[..., torch.Tensor], *, cuda: bool) -> torch.Tensor:
    """Attention by the kernel that the device would take; shape (B, H, S, E).

    Args:
        asked: The call.
        explicit: Computes it with explicit weights.
        cuda: Whether the device is a GPU.
    """
    query, key, value, mask = asked.query, asked.key, asked.value, asked.mask
    if not cuda:
        if asked.dropout > 0:  # the CPU's kernel has none
            return explicit(query, key, value, mask, asked.dropout, asked.causal, scale=asked.scale)
        return _first(
            aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, asked.causal, attn_mask=mask, scale=asked.scale
            )
        )
    if mask is None and query.dtype == torch.bfloat16:
        return _first(
            aten._scaled_dot_product_flash_attention(
                query, key, value, asked.dropout, asked.causal, return_debug_mask=False, scale=asked.scale
            )
        )
    if mask is not None:
        places = mask.shape[-1]
        if places % _TILE:
            mask = functional.pad(mask, (0, _TILE - places % _TILE))[..., :places]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    keeps = torch.is_grad_enabled() and query.requires_grad
    return _first(
        aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, keeps, asked.dropout, asked.causal, scale=asked.scale
        )
    )


def within_kernels(kind: Literal["cpu", "cuda"]) -> dict[Any, Within]:
    """What kernels of a device allocate within themselves and give back, as far as it grows with the micro-batch."""
    if kind == "cpu":
        return dict.fromkeys(_PROMOTING, _promoted)
    found: dict[Any, Within] = {
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        aten.embedding_dense_backward.default: _embedding_backward,
    }
    if hasattr(torch.ops.torch_attn, "_varlen_attn_backward"):
        found[torch.ops.torch_attn._varlen_attn_backward.default] = _varlen_backward
    return found


_PROMOTING = tuple(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"))


def _promoted(one: torch.Tensor, other: object, *_: object, **__: object) -> int:
    # Where dtypes differ a CPU first copies to the wider one; CUDA converts as it reads.
    if not isinstance(other, torch.Tensor) or one.dtype == other.dtype:
        return 0
    wider = torch.result_type(one, other)
    return sum(operand.numel() * wider.itemsize for operand in (one, other) if operand.dtype != wider and operand.dim())


def _first(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return results[0]


def _flash_backward(_: torch.Tensor, query: torch.Tensor, *__: object, **___: object) -> int:
    # Gradients of queries in fp32, and a number for each row: mha_bwd in torch's flash_api.cpp.
    batch, heads, rows, width = query.shape
    rounded = -(-rows // _FLASH_ROWS) * _FLASH_ROWS
    return 4 * batch * heads * rounded * (width + 1)


def _varlen_backward(_: torch.Tensor, query: torch.Tensor, *others: object, **__: object) -> int:
    # The same, every sequence rounded up: mha_varlen_bwd.
    places, heads, width = query.shape
    edges = next(one for one in others if isinstance(one, torch.Tensor) and one.dtype == torch.int32)
    return 4 * heads * (places + _FLASH_ROWS * (edges.numel() - 1)) * (width + 1)


def _efficient_backward(_: torch.Tensor, query: torch.Tensor, *__: object, **___: object) -> int:
    # One number for each row, in fp32; gradients are added up in registers as long as keys are not split.
    batch, heads, rows, _width = query.shape
    return 4 * batch * heads * (-(-rows // 32) * 32)


def _embedding_backward(_: torch.Tensor, indices: torch.Tensor, *__: object, **___: object) -> int:
    return 8 * _SORTED_COPIES * indices.numel()
