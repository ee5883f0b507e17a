"""Memory that torch's kernels allocate internally, by device.

A rule gives the requests of one call to the allocator. Their order must be the same at
any size, so that traces of two sizes can be compared: a block that a kernel does not
need at some size has 0 bytes there.
"""

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
    efficient_backward,
    flash_backward,
    varlen_backward,
)
from autotune.memory.jobs.embedding_requests import embedding_backward
from autotune.memory.jobs.reduction_requests import layer_norm_backward, sum_of_rows

aten = torch.ops.aten

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
    allocator; requests of a few KiB are left out.

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
    }
    # ``torch.nn.attention.varlen`` registers it, in versions of torch that have it.
    if hasattr(torch.ops.torch_attn, "_varlen_attn_backward"):
        rules[torch.ops.torch_attn._varlen_attn_backward.default] = varlen_backward
    return rules


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
