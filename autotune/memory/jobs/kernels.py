"""Memory that kernels allocate internally, by device.

A rule gives the requests of one call to the allocator. Their order must be the same at
any size, so that traces of two sizes can be compared: a block that a kernel does not
need at some size has 0 bytes there.
"""

import math
from typing import Any

import torch

from autotune.memory.decide.overheads import DeviceKind
from autotune.memory.jobs.allocator_requests import (
    OUTPUTS,
    Block,
    RequestRule,
    Requests,
)
from autotune.memory.jobs.attention_requests import (
    attend_backward,
    efficient_backward,
    flash_backward,
    varlen_backward,
)
from autotune.memory.jobs.embedding_requests import embedding_backward
from autotune.memory.jobs.reduction_requests import layer_norm_backward, sum_of_rows
from trainer.model.flash_attention import ATTEND_BACKWARD
from trainer.model.kernels.gelu_matmul import row_sums_shape
from trainer.model.kernels.residual_norm import partial_sums_shape

aten = torch.ops.aten
_FP32_BYTES = 4

_PROMOTING_OPERATORS = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
)
"""Operators that take tensors of two dtypes."""


def request_rules(kind: DeviceKind) -> dict[Any, RequestRule]:
    """Return the rule of each operator that allocates more than its results.

    CUDA's requests are those of torch 2.11 to 2.14, recorded from the caching
    allocator, and of FlashAttention 4; requests of a few KiB are left out.

    Args:
        kind: Device whose kernels are traced.
    """
    if kind == "cpu":
        return dict.fromkeys(_PROMOTING_OPERATORS, _promotion)
    rules: dict[Any, RequestRule] = {
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        aten._scaled_dot_product_efficient_attention_backward.default: (
            efficient_backward
        ),
        aten.embedding_dense_backward.default: embedding_backward,
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten.sum.dim_IntList: sum_of_rows,
        ATTEND_BACKWARD: attend_backward,
        torch.ops.trainer.residual_norm_backward.default: _residual_norm_backward,
        torch.ops.trainer.gelu_linear_backward.default: _gelu_linear_backward,
    }
    # ``torch.nn.attention.varlen`` registers it, in versions of torch that have it.
    if hasattr(torch.ops.torch_attn, "_varlen_attn_backward"):
        rules[torch.ops.torch_attn._varlen_attn_backward.default] = varlen_backward
    return rules


def _residual_norm_backward(
    _gradient: object, _narrow_gradient: object, normal: torch.Tensor, *_: object
) -> Requests:
    """Return the partial sums of the gradients of weight and biases."""
    sums = Block(_FP32_BYTES * math.prod(partial_sums_shape(normal)))
    return (OUTPUTS, sums, sums)


def _gelu_linear_backward(
    _gradient: object, _weight: object, before_gelu: torch.Tensor
) -> Requests:
    """Return the partial sums of the bias gradient."""
    sums = Block(_FP32_BYTES * math.prod(row_sums_shape(before_gelu)))
    return (OUTPUTS, sums, sums)


def _promotion(
    first: torch.Tensor, second: object, *_: object, **__: object
) -> Requests:
    """Return the copies to the wider dtype, which a CPU makes if dtypes differ.

    CUDA converts while reading.
    """
    if not isinstance(second, torch.Tensor) or first.dtype == second.dtype:
        return ()
    wider = torch.result_type(first, second)
    copied_elements = sum(
        operand.numel()
        for operand in (first, second)
        if operand.dtype != wider and operand.dim()
    )
    copies = Block(copied_elements * wider.itemsize)
    return (OUTPUTS, copies, copies)
