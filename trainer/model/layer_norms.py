"""Layer norms that set the type of the residual stream, and keep bf16 for backward.

The norms themselves compute in fp32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# ``torch.__version__`` compares as a version, not as text.
COMPILER_SAVES_COMPACT = torch.__version__ >= "2.13"
"""True if compiled code keeps for backward only the tensors that a function saves.

The compiler of torch 2.11 also keeps fp32 where bf16 was saved, and dropout's mask
beside its seed: a step of BERT took 3 % longer on an H100."""


def set_residual_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let all layer norms compute in fp32 and return ``dtype``.

    The residual stream then has this type too.
    """
    for part in model.modules():
        if type(part) is nn.LayerNorm:
            # The class is changed in place, as a new module would need its parameters,
            # hooks and place in the model.
            part.__class__ = LayerNorm
            part.result_dtype = dtype  # type: ignore[assignment]


def keep_norms_in_bf16(layers: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Let the layer norms of compiled layers keep bf16 for backward.

    A layer norm keeps its normalised input, which takes half the memory in bf16. Only
    the gradient is rounded, as in matmuls, which keep their inputs in bf16 too.

    Args:
        layers: The compiled layers.
        dtype: Type of the norms' results.
    """
    for layer in layers:
        set_residual_dtype(layer, dtype)
        for part in layer.modules():
            if isinstance(part, LayerNorm):
                part.keeps_bf16 = COMPILER_SAVES_COMPACT


class LayerNorm(nn.LayerNorm):
    """Layer norm that computes in fp32 for all dtypes of its input and weights.

    It has the name of torch's class, as memory breakdowns name activations by the class
    of their module.
    """

    result_dtype: torch.dtype
    """Type of the result, and so of the residual stream."""
    keeps_bf16 = False
    """True to keep the normalised input in bf16 for backward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, of the same shape."""
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        if self.keeps_bf16 and torch.is_grad_enabled():
            result: torch.Tensor = _Normalize.apply(
                input.float(), weight, bias, self.eps
            )  # type: ignore[no-untyped-call]
        else:
            result = functional.layer_norm(
                input.float(), self.normalized_shape, weight, bias, self.eps
            )
        return result.to(self.result_dtype)


class _Normalize(torch.autograd.Function):
    """Layer norm over the last dimension in fp32.

    Backward gets the normalised input in bf16.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, bias: Any, eps: float
    ) -> torch.Tensor:
        variance, mean = torch.var_mean(input, -1, correction=0, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        normal = (input - mean) * scale
        ctx.save_for_backward(normal.bfloat16(), scale, weight)
        ctx.has_bias = bias is not None
        result: torch.Tensor = normal if weight is None else normal * weight
        return result if bias is None else result + bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved_normal, scale, weight = ctx.saved_tensors
        normal = saved_normal.float()
        (gradient,) = gradients
        all_but_last = tuple(range(gradient.dim() - 1))
        bias_gradient = gradient.sum(all_but_last) if ctx.has_bias else None
        weight_gradient = None
        if weight is not None:
            weight_gradient = (gradient * normal).sum(all_but_last)
        normal_gradient = gradient if weight is None else gradient * weight
        # Each element of the input also changes the mean and the variance, which are
        # subtracted and divided by: these two terms are their shares of the gradient.
        variance_term = (normal_gradient * normal).mean(-1, keepdim=True)
        mean_term = normal_gradient.mean(-1, keepdim=True)
        return (
            (normal_gradient - mean_term - normal * variance_term) * scale,
            weight_gradient,
            bias_gradient,
            None,
        )
