"""Liger's fused linear cross-entropy on the meta device: its blocks and matmuls.

Liger's kernel is Triton code, which cannot run without content. Blocks and matmuls
follow ``ops/fused_linear_cross_entropy.py`` of liger-kernel 0.8. Shapes: K positions
that the head computes, D dimensions of a hidden state, V tokens of the vocabulary.
"""

from typing import Any

import torch

from autotune.memory.decide.rounding import ceil_divide


def fused_loss(*tensors: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all positions, as Liger's function does.

    Args:
        tensors: Hidden states (K, D), weight of the head (V, D), labels (K), and bias
            (V) or None.
    """
    # Liger's kernel is outside of autocast, which is a function mode here. Torch has no
    # public way to turn function modes off.
    with torch._C.DisableTorchFunction():
        loss: torch.Tensor = _FusedLoss.apply(*tensors)  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    """Loss that computes its gradients in forward, from one chunk of logits at a time.

    So all logits never exist at once. A chunk is about as large as the hidden states.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_KD: Any, weight_VD: Any, labels_K: Any, bias_V: Any
    ) -> torch.Tensor:
        chunk_size = _chunk_size(hidden_KD, weight_VD)
        bias_gradient_V = None
        hidden_gradient_KD = torch.zeros_like(hidden_KD)
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        if bias_V is not None:
            bias_gradient_V = torch.zeros_like(bias_V, dtype=torch.float32)
        losses_K = torch.zeros_like(labels_K, dtype=torch.float32)
        # Liger allocates the next two blocks for each chunk. One block each for all
        # chunks has the same peak, and makes the number of events independent of the
        # chunks.
        logits = hidden_KD.new_empty((chunk_size, len(weight_VD)))
        sums_V = hidden_KD.new_empty(len(weight_VD))
        for hidden, hidden_gradient in zip(
            hidden_KD.split(chunk_size),
            hidden_gradient_KD.split(chunk_size),
            strict=True,
        ):
            chunk = torch.mm(hidden, weight_VD.t(), out=logits[: len(hidden)])
            if bias_gradient_V is not None:
                chunk.add_(bias_V)
                bias_gradient_V.add_(torch.sum(chunk, 0, out=sums_V))
            # Stands for Liger's kernel, which writes gradients over the logits.
            chunk.tanh_()
            torch.mm(chunk, weight_VD, out=hidden_gradient)
            torch.addmm(
                weight_gradient_VD,
                chunk.t(),
                hidden,
                out_dtype=torch.float32,
                out=weight_gradient_VD,
            )
        # Liger has released the blocks of the chunks when it casts the gradients.
        del logits, chunk, sums_V
        cast_weight_gradient_VD = weight_gradient_VD.to(weight_VD.dtype)
        cast_bias_gradient_V = None
        if bias_gradient_V is not None:
            cast_bias_gradient_V = bias_gradient_V.to(weight_VD.dtype)
        ctx.gradients = (
            hidden_gradient_KD,
            cast_weight_gradient_VD,
            cast_bias_gradient_V,
        )
        return losses_K.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient_KD, weight_gradient_VD, bias_gradient_V = ctx.gradients
        labels_gradient = None
        return hidden_gradient_KD, weight_gradient_VD, labels_gradient, bias_gradient_V


def _chunk_size(hidden_KD: torch.Tensor, weight_VD: torch.Tensor) -> int:
    """Return the number of positions in a chunk, as Liger chooses it."""
    vocab_size, hidden_size = weight_VD.shape
    chunks = ceil_divide(vocab_size, hidden_size)
    positions = ceil_divide(len(hidden_KD), chunks)
    next_power_of_two = 1 << (positions - 1).bit_length()
    return min(next_power_of_two, len(hidden_KD))
