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
from autotune.memory.jobs.allocation_recorder import OUTPUTS, Block, Requests, Within
from trainer.config.train_config import Attention

aten = torch.ops.aten

_FLASH_POSITIONS = 128
"""FlashAttention 2's backward accumulates gradients of queries in fp32, with every
document rounded up to a multiple of this many positions."""
_FLASH_WIDTH = 32
"""It rounds heads up to a multiple of this many dimensions."""
_INT64_BYTES = 8
_FP32_BYTES = 4
_MAX_SIMPLE_INDICES = 3072
"""Most indices for which an embedding's backward needs no memory."""
_MAX_SIMPLE_WEIGHTS = 527
"""Most weights for which an embedding's backward needs only counts."""
_SEGMENT_INDICES = 10
"""Indices per partial sum in an embedding's backward: NROWS_PER_THREAD in
EmbeddingBackwardKernel.cu."""
_SMS = 132
"""SMs of an H100 or H200. They affect short reductions only: long ones take 256 values
a thread."""
_THREADS_PER_SM = 2048
_BLOCK_THREADS = 128
_WARP = 32
_VECTOR = 4
_MIN_VALUES_PER_THREAD = 16
"""Least values per thread of a reduction, in Reduce.cuh."""
_MAX_VALUES_PER_THREAD = 256
_LARGEST_OFFSET_BYTES = 2**31 - 1
"""Largest tensor that is reduced at once; larger ones are halved."""
_PARTIAL_ROWS_FROM = 64 * 1024
"""Rows above which a layer norm's backward keeps partial sums."""
_MAX_PARTIAL_VALUES = 2**20
"""Most values in these partial sums."""


def within_kernels(
    kind: DeviceKind, attention: Attention = "auto"
) -> dict[Any, Within]:
    """Return the allocator requests of each operator besides its results, in order.

    CUDA's are those of torch 2.11 to 2.14, recorded from the caching allocator, and of
    FlashAttention 3, read from its source; requests of a few KiB are left out.
    """
    if kind == "cpu":
        return dict.fromkeys(_PROMOTING, _promoted)
    rules: dict[Any, Within] = {
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        aten.sum.dim_IntList: _sum,
        aten._scaled_dot_product_efficient_attention_backward.default: (
            _efficient_backward
        ),
        aten.embedding_dense_backward.default: _embedding_backward,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
    }
    if hasattr(torch.ops.torch_attn, "_varlen_attn_backward"):
        varlen = _fa3_backward if attention == "fa3" else _varlen_backward
        rules[torch.ops.torch_attn._varlen_attn_backward.default] = varlen
    return rules


_PROMOTING = tuple(
    getattr(aten, name).Tensor
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
)


def _promoted(
    first: torch.Tensor, second: object, *_: object, **__: object
) -> Requests:
    # If dtypes differ, a CPU first copies to the wider one; CUDA converts while
    # reading.
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
    _: torch.Tensor, query: torch.Tensor, *__: object, **___: object
) -> Requests:
    # A number per position, and gradients of queries in fp32: mha_bwd in torch's
    # flash_api.cpp.
    batch, heads, positions, width = query.shape
    return _accumulated(batch * _round_up(positions, _FLASH_POSITIONS), heads, width)


def _varlen_backward(
    _: torch.Tensor, query: torch.Tensor, *others: object, **__: object
) -> Requests:
    # The same, every document rounded up: mha_varlen_bwd.
    positions, heads, width = query.shape
    padding = _FLASH_POSITIONS * _documents(others)
    return _accumulated(positions + padding, heads, width)


def _fa3_backward(
    _: torch.Tensor, query: torch.Tensor, *others: object, **__: object
) -> Requests:
    # Two numbers per position, and longer heads: mha_bwd in hopper/flash_api.cpp; all
    # released by Python, in order.
    positions, heads, width = query.shape
    padded_width = next(size for size in (64, 96, 128, 192, 256) if width <= size)
    tile = {64: 128, 128: 80}.get(padded_width, 64)
    padded_positions = _round_up(positions + tile * _documents(others), tile)
    # Two blocks of the same size: a block is known by its identity.
    first_numbers = Block(_FP32_BYTES * heads * padded_positions)
    second_numbers = Block(_FP32_BYTES * heads * padded_positions)
    sums = Block(first_numbers.size_bytes * padded_width)
    return (
        OUTPUTS,
        first_numbers,
        second_numbers,
        sums,
        first_numbers,
        second_numbers,
        sums,
    )


def _documents(arguments: tuple[object, ...]) -> int:
    """Return the number of documents, by the tensor of their edges."""
    edges = next(
        argument
        for argument in arguments
        if isinstance(argument, torch.Tensor) and argument.dtype == torch.int32
    )
    return edges.numel() - 1


def _accumulated(positions: int, heads: int, width: int) -> Requests:
    numbers = Block(_FP32_BYTES * positions * heads)
    sums = Block(numbers.size_bytes * _round_up(width, _FLASH_WIDTH))
    return (OUTPUTS, numbers, sums, sums, numbers)


def _efficient_backward(
    _: torch.Tensor, query: torch.Tensor, *__: object, **___: object
) -> Requests:
    # A number per position, and gradients of queries in blocks with a header of 16
    # bytes: kernel_backward.h.
    batch, heads, positions, width = query.shape
    delta = Block(_FP32_BYTES * batch * heads * positions)
    padded_width = 64 if width <= 64 else 128
    is_fp32 = query.dtype == torch.float32
    block_positions = 128 if padded_width == 128 and not is_fp32 else 64
    blocks = batch * heads * -(-positions // block_positions)
    block_bytes = block_positions * padded_width * _FP32_BYTES + 16
    workspace = Block(blocks * block_bytes)
    # No fused kernel multiplies gradients with results.
    if is_fp32:
        product = Block(_FP32_BYTES * query.numel())
        copied = Block(delta.size_bytes)
        return (
            OUTPUTS,
            product,
            copied,
            delta,
            copied,
            product,
            workspace,
            delta,
            workspace,
        )
    return (OUTPUTS, delta, workspace, delta, workspace)


def _embedding_backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    weights: int,
    *_: object,
    **__: object,
) -> Requests:
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
    # native_layer_norm_backward(gradient, input, normalized_shape, ..., output_mask)
    _input, normalized_shape, *_rest, output_mask = others
    width = math.prod(normalized_shape)
    rows = gradient.numel() // width
    # The gradients of weight and bias, if they are wanted.
    wanted = sum(output_mask[1:])
    partial_rows = 0
    if rows > _PARTIAL_ROWS_FROM and width // _WARP < _SMS // 2:
        partial_rows = min(-(-rows // 32), _MAX_PARTIAL_VALUES // width)
    partial = [Block(_FP32_BYTES * partial_rows * width) for _ in range(wanted)]
    return (
        OUTPUTS,
        *partial,
        *_reduction(partial_rows, width, torch.float32),
        *partial,
    )


def _sum(
    tensor: torch.Tensor, dims: Sequence[int] | None = None, *_: object, **__: object
) -> Requests:
    # Sums over all but the last dimension, as biases have their gradients: Reduce.cuh.
    leading = list(range(tensor.dim() - 1))
    if (
        not leading
        or sorted(dim % tensor.dim() for dim in dims or ()) != leading
        or not tensor.is_contiguous()
    ):
        return ()
    columns = tensor.shape[-1]
    return (OUTPUTS, *_reduction(tensor.numel() // columns, columns, tensor.dtype))


def _reduction(rows: int, columns: int, dtype: torch.dtype) -> Requests:
    """Return the requests of a sum over rows, if thread blocks share its columns."""
    parts = 1
    while columns * rows * dtype.itemsize > _LARGEST_OFFSET_BYTES * parts:
        parts *= 2
    vector = math.gcd(columns, _VECTOR)
    threads = _BLOCK_THREADS * _VECTOR // vector
    part_rows = rows // parts
    width = min(_power_of_two_within(columns // vector), _WARP)
    height = min(_power_of_two_within(max(1, part_rows)), threads // width)
    values_per_thread = -(-part_rows // height)
    blocks = -(-columns // (vector * width))
    # Blocks that run at once.
    filled = _SMS * (_THREADS_PER_SM // (width * height))
    shares = max(
        min(-(-filled // blocks), -(-values_per_thread // _MIN_VALUES_PER_THREAD)),
        -(-values_per_thread // _MAX_VALUES_PER_THREAD),
    )
    is_alone = (
        values_per_thread < _MAX_VALUES_PER_THREAD or blocks > filled or shares == 1
    )
    staged_bytes = 0
    if not is_alone:
        staged_bytes = _FP32_BYTES * columns * shares * width * vector
    sums_bytes = 0
    if parts > 1 and dtype != torch.float32:
        sums_bytes = _FP32_BYTES * columns
    staged, sums = Block(staged_bytes), Block(sums_bytes)
    return (sums, staged, staged, sums)


def _power_of_two_within(number: int) -> int:
    """Return the largest power of two that does not exceed a number."""
    return 1 << number.bit_length() - 1


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
