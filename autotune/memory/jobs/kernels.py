"""Memory that kernels allocate internally, by device.

A rule gives the requests of one call to the allocator. Their order must be the same at
any size, so that traces of two sizes can be compared: a block that a kernel does not
need at some size has 0 bytes there.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from autotune.memory.decide.overheads import DeviceKind
from autotune.memory.jobs.allocation_recorder import (
    OUTPUTS,
    Block,
    RequestRule,
    Requests,
)
from trainer.config.train_config import Attention

aten = torch.ops.aten

_PROMOTING_OPERATORS = tuple(
    getattr(aten, name).Tensor
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
)
"""Operators that take tensors of two dtypes."""
_INT64_BYTES = 8
_FP32_BYTES = 4

# Attention.

_FLASH_POSITIONS = 128
"""FlashAttention 2's backward accumulates gradients of queries in fp32, with every
document rounded up to a multiple of this many positions."""
_FLASH_WIDTH = 32
"""It rounds heads up to a multiple of this many dimensions."""
_FA3_WIDTHS = (64, 96, 128, 192, 256)
"""Dimensions of a head for which FlashAttention 3 has kernels: the next larger one
takes a head of another width."""
_FA3_TILE_POSITIONS = {64: 128, 96: 64, 128: 80, 192: 64, 256: 64}
"""Query positions of a tile of its backward, by that width."""
_EFFICIENT_WIDTH = 64
"""Widest head of the smaller kernel of memory-efficient attention; the larger one takes
twice as many dimensions."""
_EFFICIENT_HEADER_BYTES = 16
"""Header of each block in which its backward keeps gradients of queries."""

# Embeddings: EmbeddingBackwardKernel.cu.

_MAX_SIMPLE_INDICES = 3072
"""Most indices for which an embedding's backward needs no memory."""
_MAX_SIMPLE_WEIGHTS = 527
"""Most weights for which an embedding's backward needs only counts."""
_SEGMENT_INDICES = 10
"""Indices per partial sum in an embedding's backward: NROWS_PER_THREAD."""

# Reductions: Reduce.cuh.

_SMS = 132
"""SMs of an H100 or H200. They affect short reductions only: long ones take 256 values
a thread."""
_THREADS_PER_SM = 2048
"""Threads that an SM of such a GPU runs at once."""
_BLOCK_THREADS = 128
"""Threads of a block if each reads ``_VECTOR`` values at once; else there are more."""
_WARP = 32
"""Threads of a warp."""
_VECTOR = 4
"""Values that a thread reads at once, if the number of columns is a multiple."""
_MIN_VALUES_PER_THREAD = 16
"""Least values per thread of a reduction."""
_MAX_VALUES_PER_THREAD = 256
"""Values per thread from which blocks share a reduction."""
_LARGEST_OFFSET_BYTES = 2**31 - 1
"""Largest tensor that is reduced at once; larger ones are halved."""

# Layer norms: layer_norm_kernel.cu.

_PARTIAL_ROWS_FROM = 64 * 1024
"""Rows above which a layer norm's backward keeps partial sums."""
_ROWS_PER_PARTIAL = 32
"""Rows of a partial sum."""
_MAX_PARTIAL_VALUES = 2**20
"""Most values in these partial sums."""


def request_rules(
    kind: DeviceKind, attention: Attention = "auto"
) -> dict[Any, RequestRule]:
    """Return the allocator requests of each operator besides its results, in order.

    CUDA's are those of torch 2.11 to 2.14, recorded from the caching allocator, and of
    FlashAttention 3, read from its source; requests of a few KiB are left out.
    """
    if kind == "cpu":
        return dict.fromkeys(_PROMOTING_OPERATORS, _promotion)
    rules: dict[Any, RequestRule] = {
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        aten.sum.dim_IntList: _sum,
        aten._scaled_dot_product_efficient_attention_backward.default: (
            _efficient_backward
        ),
        aten.embedding_dense_backward.default: _embedding_backward,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
    }
    # ``torch.nn.attention.varlen`` registers it, in versions of torch that have it.
    if hasattr(torch.ops.torch_attn, "_varlen_attn_backward"):
        varlen = _fa3_backward if attention == "fa3" else _varlen_backward
        rules[torch.ops.torch_attn._varlen_attn_backward.default] = varlen
    return rules


# Rules: each takes the arguments of its operator.


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
    copied = Block(copied_elements * wider.itemsize)
    return (OUTPUTS, copied, copied)


def _flash_backward(
    _gradient: torch.Tensor, query: torch.Tensor, *_: object, **__: object
) -> Requests:
    """Return the requests of ``mha_bwd`` in torch's flash_api.cpp."""
    batch, heads, positions, width = query.shape
    padded_positions = batch * _round_up(positions, _FLASH_POSITIONS)
    return _query_gradient_requests(padded_positions, heads, width)


def _varlen_backward(
    _gradient: torch.Tensor, query: torch.Tensor, *others: object, **_: object
) -> Requests:
    """Return the requests of ``mha_varlen_bwd``, which rounds up every document."""
    positions, heads, width = query.shape
    padding = _FLASH_POSITIONS * _count_documents(others)
    return _query_gradient_requests(positions + padding, heads, width)


def _fa3_backward(
    _gradient: torch.Tensor, query: torch.Tensor, *others: object, **_: object
) -> Requests:
    """Return the requests of ``mha_bwd`` in hopper/flash_api.cpp.

    It keeps two numbers per position, instead of one. Python releases all blocks, in
    the order in which they were allocated.
    """
    positions, heads, width = query.shape
    padded_width = next(size for size in _FA3_WIDTHS if width <= size)
    tile = _FA3_TILE_POSITIONS[padded_width]
    padded_positions = _round_up(positions + tile * _count_documents(others), tile)
    # Two blocks of the same size: a block is known by its identity.
    first_numbers = Block(_FP32_BYTES * heads * padded_positions)
    second_numbers = Block(_FP32_BYTES * heads * padded_positions)
    gradients = Block(first_numbers.size_bytes * padded_width)
    blocks = (first_numbers, second_numbers, gradients)
    return (OUTPUTS, *blocks, *blocks)


def _count_documents(arguments: tuple[object, ...]) -> int:
    """Return the number of documents in a call of varlen attention.

    Their edges are the first int32 tensor among its arguments.
    """
    edges = next(
        argument
        for argument in arguments
        if isinstance(argument, torch.Tensor) and argument.dtype == torch.int32
    )
    return edges.numel() - 1


def _query_gradient_requests(positions: int, heads: int, width: int) -> Requests:
    """Return the requests of FlashAttention 2: a number per position, and gradients."""
    numbers = Block(_FP32_BYTES * positions * heads)
    gradients = Block(numbers.size_bytes * _round_up(width, _FLASH_WIDTH))
    return (OUTPUTS, numbers, gradients, gradients, numbers)


def _efficient_backward(
    _gradient: torch.Tensor, query: torch.Tensor, *_: object, **__: object
) -> Requests:
    """Return the requests of kernel_backward.h.

    It keeps a number per position, and gradients of queries in blocks with a header.
    """
    batch, heads, positions, width = query.shape
    delta = Block(_FP32_BYTES * batch * heads * positions)
    is_narrow = width <= _EFFICIENT_WIDTH
    padded_width = _EFFICIENT_WIDTH if is_narrow else 2 * _EFFICIENT_WIDTH
    is_fp32 = query.dtype == torch.float32
    block_positions = 64 if is_narrow or is_fp32 else 128
    blocks = batch * heads * _ceil_divide(positions, block_positions)
    gradients_bytes = _FP32_BYTES * block_positions * padded_width
    workspace = Block(blocks * (gradients_bytes + _EFFICIENT_HEADER_BYTES))
    if not is_fp32:
        return (OUTPUTS, delta, workspace, delta, workspace)
    # No fused kernel multiplies fp32 gradients with results.
    product = Block(_FP32_BYTES * query.numel())
    copied = Block(delta.size_bytes)
    before = (product, copied, delta, copied, product)
    return (OUTPUTS, *before, workspace, delta, workspace)


def _embedding_backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    weights: int,
    *_: object,
    **__: object,
) -> Requests:
    """Return the requests of ``embedding_backward_cuda_kernel``.

    It sorts the indices, cuts equal ones into segments, and adds up partial sums.
    """
    count = 0
    if indices.numel() > _MAX_SIMPLE_INDICES:
        count = indices.numel()
    ids = Block(_INT64_BYTES * count)
    ordered_ids = Block(_INT64_BYTES * count)
    ordered = Block(_INT64_BYTES * count)
    offsets = Block(_INT64_BYTES * count)
    unique = Block(_INT64_BYTES * count)
    sorting = Block(2 * ids.size_bytes + ids.size_bytes // 32)
    segments = min(count, weights)
    segment_sizes = Block(_INT64_BYTES * segments)
    segment_ends = Block(_INT64_BYTES * segments)
    partials = count // _SEGMENT_INDICES + segments if count else 0
    partial_starts = Block(_INT64_BYTES * partials)
    sums_bytes = _FP32_BYTES * partials * gradient.shape[-1]
    if weights <= _MAX_SIMPLE_WEIGHTS:
        sums_bytes = partial_starts.size_bytes
    sums = Block(sums_bytes)
    before = (ids, ordered_ids, ordered, sorting, sorting, ordered)
    after = (
        offsets,
        unique,
        unique,
        segment_sizes,
        segment_ends,
        partial_starts,
        sums,
        sums,
        partial_starts,
        segment_ends,
        segment_sizes,
        offsets,
        ordered_ids,
        ids,
    )
    return (*before, OUTPUTS, *after)


def _layer_norm_backward(gradient: torch.Tensor, *others: Any, **_: object) -> Requests:
    """Return the partial sums of the gradients of weight and bias, and their reduction.

    A kernel keeps partial sums of many rows if the columns alone would not fill the
    SMs.
    """
    # native_layer_norm_backward(gradient, input, normalized_shape, ..., output_mask)
    _input, normalized_shape, *_rest, output_mask = others
    width = math.prod(normalized_shape)
    rows = gradient.numel() // width
    partial_rows = 0
    if rows > _PARTIAL_ROWS_FROM and width // _WARP < _SMS // 2:
        partial_rows = min(
            _ceil_divide(rows, _ROWS_PER_PARTIAL), _MAX_PARTIAL_VALUES // width
        )
    # The first result is the gradient of the input.
    needed_gradients = sum(output_mask[1:])
    partial_sums = [
        Block(_FP32_BYTES * partial_rows * width) for _ in range(needed_gradients)
    ]
    return (
        OUTPUTS,
        *partial_sums,
        *_reduction_requests(partial_rows, width, torch.float32),
        *partial_sums,
    )


def _sum(
    tensor: torch.Tensor, dims: Sequence[int] | None = None, *_: object, **__: object
) -> Requests:
    """Return the requests of a sum over all but the last dimension.

    Such sums are the gradients of biases. Others are taken to need no memory.
    """
    leading = list(range(tensor.dim() - 1))
    if (
        not leading
        or sorted(dim % tensor.dim() for dim in dims or ()) != leading
        or not tensor.is_contiguous()
    ):
        return ()
    columns = tensor.shape[-1]
    rows = tensor.numel() // columns
    return (OUTPUTS, *_reduction_requests(rows, columns, tensor.dtype))


def _reduction_requests(rows: int, columns: int, dtype: torch.dtype) -> Requests:
    """Return the requests of a sum over rows, if thread blocks share its columns."""
    parts = 1
    while columns * rows * dtype.itemsize > _LARGEST_OFFSET_BYTES * parts:
        parts *= 2
    vector = math.gcd(columns, _VECTOR)
    threads = _BLOCK_THREADS * _VECTOR // vector
    part_rows = rows // parts
    width = min(_power_of_two_within(columns // vector), _WARP)
    height = min(_power_of_two_within(max(1, part_rows)), threads // width)
    values_per_thread = _ceil_divide(part_rows, height)
    blocks = _ceil_divide(columns, vector * width)
    running_blocks = _SMS * (_THREADS_PER_SM // (width * height))
    # Blocks that share the rows of the same columns.
    shares = max(
        min(
            _ceil_divide(running_blocks, blocks),
            _ceil_divide(values_per_thread, _MIN_VALUES_PER_THREAD),
        ),
        _ceil_divide(values_per_thread, _MAX_VALUES_PER_THREAD),
    )
    is_shared = (
        values_per_thread >= _MAX_VALUES_PER_THREAD
        and blocks <= running_blocks
        and shares > 1
    )
    staged_bytes = 0
    if is_shared:
        staged_bytes = _FP32_BYTES * columns * shares * width * vector
    sums_bytes = 0
    if parts > 1 and dtype != torch.float32:
        sums_bytes = _FP32_BYTES * columns
    staged = Block(staged_bytes)
    sums = Block(sums_bytes)
    return (sums, staged, staged, sums)


def _power_of_two_within(number: int) -> int:
    """Return the largest power of two that does not exceed a number."""
    return 1 << number.bit_length() - 1


def _ceil_divide(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _round_up(value: int, step: int) -> int:
    return _ceil_divide(value, step) * step
