"""Attention kernels that a device would choose, called on the meta device.

Shapes: B sequences, H heads, S query positions of a sequence, E dimensions of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten

_MASK_TILE = 16
"""Positions to whose multiples the memory-efficient kernel pads rows of masks."""
_MAX_FLASH_WIDTH = 256
"""Dimensions of the widest head that FlashAttention computes."""
_ALIGNED_BYTES = 16
"""Size of which heads must be a multiple in the memory-efficient kernel."""


def attend(  # noqa: PLR0917 - torch's own order
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    *,
    explicit: Callable[..., torch.Tensor],
    cuda: bool,
) -> torch.Tensor:
    """Call the attention kernel that the device would choose; shape (B, H, S, E).

    The first arguments are those of ``scaled_dot_product_attention``.

    Args:
        query: Query of each head.
        key: Key of each head.
        value: Value of each head.
        mask: Additive mask.
        dropout: Probability of dropout.
        causal: True if a position attends to earlier ones only.
        scale: Factor of the logits; None takes the default.
        explicit: Function with the same arguments that computes explicit weights. It is
            called if the device has no fused kernel.
        cuda: True for a GPU, False for a CPU.
    """
    options: dict[str, Any]
    if not cuda:
        if dropout > 0:
            # The CPU's kernel has no dropout.
            return explicit(query, key, value, mask, dropout, causal, scale=scale)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        options = {"attn_mask": mask}
    elif _takes_flash(query, mask):
        kernel = aten._scaled_dot_product_flash_attention
        options = {"return_debug_mask": False}
    elif query.shape[-1] * query.element_size() % _ALIGNED_BYTES:
        # No fused kernel takes such heads.
        return explicit(query, key, value, mask, dropout, causal, scale=scale)
    else:
        if mask is not None:
            mask = _tiled(mask).expand(
                query.shape[0], query.shape[1], query.shape[2], key.shape[2]
            )
        kernel = aten._scaled_dot_product_efficient_attention
        options = {
            "attn_bias": mask,
            "compute_log_sumexp": torch.is_grad_enabled() and query.requires_grad,
        }
    results: tuple[torch.Tensor, ...] = kernel(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, **options
    )
    return results[0]


def _takes_flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether a GPU computes this attention with FlashAttention 2."""
    is_bf16 = query.dtype == torch.bfloat16
    return mask is None and is_bf16 and query.shape[-1] <= _MAX_FLASH_WIDTH


def _tiled(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows begin in memory at multiples of a tile."""
    positions = mask.shape[-1]
    if positions % _MASK_TILE:
        padding = _MASK_TILE - positions % _MASK_TILE
        mask = functional.pad(mask, (0, padding))[..., :positions]
    return mask
