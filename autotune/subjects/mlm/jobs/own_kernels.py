"""The trainer's own kernels: the memory that they allocate, their FLOPs and bytes."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from autotune.memory.jobs.allocator_requests import OUTPUTS, Block, Requests
from autotune.memory.jobs.attention_requests import (
    FLASH_POSITIONS,
    count_documents,
    fa4_requests,
    flash_requests,
)
from autotune.memory.jobs.tracer import OwnKernels
from autotune.speed.jobs.count_kernels import (
    BACKWARD_MATMULS,
    keys_in_window,
    matmul_kernel,
    moved_bytes,
    number_format,
    tensors_in,
)
from autotune.speed.values import Kernel
from trainer.model.flash_attention import ATTEND, ATTEND_BACKWARD
from trainer.model.kernels.gelu_matmul import row_sums_shape
from trainer.model.kernels.residual_norm import partial_sums_shape

_FP32_BYTES = 4
_ATTENTION_KERNELS = {"fa2": "varlen", "fa4": "FA4"}
"""Names of the kernels that ``trainer::attend_documents`` calls; FlashAttention 2 has
the rates of torch's varlen attention."""


def own_kernels() -> OwnKernels:
    """Return the rules of the trainer's operators."""
    operators = torch.ops.trainer
    return OwnKernels(
        requests={
            ATTEND_BACKWARD: _attend_backward,
            operators.residual_norm_backward.default: _residual_norm_backward,
            operators.gelu_linear_backward.default: _gelu_linear_backward,
        },
        kernels={
            ATTEND: _attend_kernel,
            ATTEND_BACKWARD: _attend_backward_kernel,
            operators.linear_gelu.default: _gelu_kernel,
            operators.gelu_linear_backward.default: _gelu_kernel,
            operators.residual_norm.default: _norm_kernel,
            operators.residual_norm_backward.default: _norm_kernel,
        },
    )


def _attend_backward(
    _gradient: torch.Tensor, joined: Sequence[torch.Tensor], *others: object
) -> Requests:
    """Return the requests of backward of ``trainer::attend_documents``."""
    documents = count_documents(others)
    query = joined[0][:, 0]
    if others[-1] == "fa4":
        return fa4_requests(query, documents)
    positions, heads, width = query.shape
    padded_positions = positions + FLASH_POSITIONS * documents
    kernel = flash_requests(padded_positions, heads, width)
    if all(tensor.shape[1] == 1 for tensor in joined):
        return kernel
    # Gradients of parts are separate until they are joined.
    parts = tuple(
        Block(part.numel() * part.element_size())
        for tensor in joined
        for part in tensor.unbind(1)
    )
    return (*parts, *kernel[1:], OUTPUTS, *parts)


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


def _attend_kernel(args: Any, result: Any, document_tokens: float) -> Kernel:
    """Return the kernel of ``trainer::attend_documents``."""
    return _attention_kernel(
        args[0],
        args[-4],
        f"{_ATTENTION_KERNELS[args[-2]]} forward",
        moved_bytes(tensors_in((args, result))),
        document_tokens,
    )


def _attend_backward_kernel(args: Any, result: Any, document_tokens: float) -> Kernel:
    """Return the kernel of the backward of ``trainer::attend_documents``."""
    forward = _attention_kernel(
        args[1],
        args[-3],
        f"{_ATTENTION_KERNELS[args[-1]]} backward",
        moved_bytes(tensors_in((args, result))),
        document_tokens,
    )
    return forward._replace(flops=forward.flops * BACKWARD_MATMULS)


def _attention_kernel(
    joined: Sequence[torch.Tensor],
    window: int,
    name: str,
    moved: int,
    document_tokens: float,
) -> Kernel:
    """Return a kernel of attention, with the FLOPs of its forward.

    Args:
        joined: Tensors that hold queries, keys and values.
        window: Reach of attention to either side; negative for the whole document.
        name: Name of the kernel and its pass.
        moved: Bytes that it reads and writes.
        document_tokens: Mean length of a document.
    """
    queries, _parts, heads, width = joined[0].shape
    keys = keys_in_window(window, document_tokens)
    flops = 4.0 * queries * heads * keys * width
    return Kernel("attention", name, number_format(joined[0]), flops, moved, keys)


def _gelu_kernel(args: Any, result: Any, _document_tokens: float) -> Kernel:
    """Return the matmul of ``trainer::linear_gelu``, or of its backward.

    It also reads a bias, or the values before GELU.
    """
    return matmul_kernel(args[:2], tensors_in(result), tensors_in(args[2:]))


def _norm_kernel(args: Any, result: Any, _document_tokens: float) -> Kernel:
    """Return the kernel of a residual sum and its norm, or of their backward."""
    return Kernel("norm", "", "", 0.0, moved_bytes(tensors_in((args, result))))
