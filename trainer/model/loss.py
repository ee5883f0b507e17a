"""Cross-entropy of logits, summed over tokens to predict.

Slots whose label is ``IGNORED_LABEL`` add nothing.

Shapes: K slots of the head, D hidden, V ids.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from trainer.data.masking import IGNORED_LABEL


def cross_entropy(logits_KV: torch.Tensor, labels_K: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of logits, in fp32 or wider, shape ()."""
    return functional.cross_entropy(
        _wide(logits_KV), labels_K, ignore_index=IGNORED_LABEL, reduction="sum"
    )


def cross_entropy_in_place(
    compile_kernel: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return a ``cross_entropy`` whose backward writes the gradient over the logits.

    A step's memory peaks while logits, its largest tensor, and their gradient are held.
    Forward and backward each read the logits once.

    Args:
        compile_kernel: Function that compiles another one into one kernel.

    Returns:
        The function. Its backward raises ``RuntimeError`` if anything else kept the
        logits for its own gradient.
    """
    return functools.partial(
        _InPlace.apply,
        compile_kernel(_loss_and_norm),
        compile_kernel(_write_gradient),
    )


class _InPlace(torch.autograd.Function):
    """Loss whose backward writes the gradient over the saved logits."""

    @staticmethod
    def forward(
        ctx: Any, loss_and_norm: Any, write_gradient: Any, logits_KV: Any, labels_K: Any
    ) -> Any:
        loss, norm_K1 = loss_and_norm(logits_KV, labels_K)
        ctx.save_for_backward(logits_KV, labels_K, norm_K1)
        ctx.write_gradient = write_gradient
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_KV, labels_K, norm_K1 = ctx.saved_tensors
        ctx.write_gradient(logits_KV, labels_K, norm_K1, gradient)
        return None, None, logits_KV, None


def _loss_and_norm(
    logits_KV: torch.Tensor, labels_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and each slot's log-sum-exp of logits, shape (K, 1)."""
    wide_KV = _wide(logits_KV)
    largest_K1 = wide_KV.amax(1, keepdim=True)
    norm_K1 = largest_K1 + (wide_KV - largest_K1).exp().sum(1, keepdim=True).log()
    losses_K1 = norm_K1 - wide_KV.gather(1, labels_K.clamp_min(0).unsqueeze(1))
    is_ignored_K1 = labels_K.unsqueeze(1) == IGNORED_LABEL
    return losses_K1.masked_fill(is_ignored_K1, 0).sum(), norm_K1


def _write_gradient(
    logits_KV: torch.Tensor,
    labels_K: torch.Tensor,
    norm_K1: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Write the gradient of the logits, softmax less one-hot labels, over them."""
    ids_V = torch.arange(logits_KV.shape[1], device=logits_KV.device)
    label_K1 = labels_K.unsqueeze(1)
    # The probabilities have no name, which would keep their memory for the whole
    # function: these tensors are the largest of a step that is not compiled.
    gradient_KV = (
        (_wide(logits_KV) - norm_K1).exp() - (ids_V == label_K1).float()
    ) * gradient
    logits_KV.copy_(gradient_KV.masked_fill(label_K1 == IGNORED_LABEL, 0))


def _wide(logits_KV: torch.Tensor) -> torch.Tensor:
    """Return logits in the type in which the loss is computed."""
    # fp32 at least, as sums over the vocabulary lose too much in bf16.
    return logits_KV if logits_KV.dtype == torch.float64 else logits_KV.float()
