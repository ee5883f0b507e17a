"""Memory that sums and a layer norm's backward allocate internally on CUDA.

Constants and requests of sums are those of Reduce.cuh, those of layer norms are of
layer_norm_kernel.cu.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from autotune.memory.decide.rounding import ceil_divide
from autotune.memory.jobs.allocator_requests import OUTPUTS, Block, Requests

_FP32_BYTES = 4
_WARP = 32
"""Threads of a warp."""
_SMS = 132
"""SMs of an H100 or H200. They affect short reductions only: long ones take 256 values
a thread."""
_THREADS_PER_SM = 2048
"""Threads that an SM of such a GPU runs at once."""
_BLOCK_THREADS = 128
"""Threads of a block if each reads ``_VECTOR`` values at once; else there are more."""
_VECTOR = 4
"""Values that a thread reads at once, if the number of columns is a multiple."""
_MIN_VALUES_PER_THREAD = 16
"""Least values per thread of a reduction that several blocks share."""
_MAX_VALUES_PER_THREAD = 256
"""Values per thread from which blocks share a reduction."""
_LARGEST_OFFSET_BYTES = 2**31 - 1
"""Largest tensor that is reduced at once; larger ones are halved."""

_PARTIAL_ROWS_FROM = 64 * 1024
"""Rows above which a layer norm's backward keeps partial sums."""
_ROWS_PER_PARTIAL = 32
"""Rows of a partial sum."""
_MAX_PARTIAL_VALUES = 2**20
"""Most values in these partial sums."""


def sum_of_rows(
    tensor: torch.Tensor, dims: Sequence[int] | None = None, *_: object, **__: object
) -> Requests:
    """Return the requests of a sum over all but the last dimension.

    Such sums are the gradients of biases. Others are taken to need no memory.
    """
    leading = list(range(tensor.dim() - 1))
    summed = sorted(dim % tensor.dim() for dim in dims or ())
    if not leading or summed != leading or not tensor.is_contiguous():
        return ()
    columns = tensor.shape[-1]
    rows = tensor.numel() // columns
    return (OUTPUTS, *_reduction_requests(rows, columns, tensor.dtype))


def layer_norm_backward(gradient: torch.Tensor, *others: Any, **_: object) -> Requests:
    """Return the partial sums of the gradients of weight and bias, and their reduction.

    A kernel keeps partial sums of many rows if the columns alone would not fill the
    SMs.
    """
    # native_layer_norm_backward(gradient, input, normalized_shape, ..., output_mask)
    _input, normalized_shape, *_rest, output_mask = others
    width = math.prod(normalized_shape)
    rows = gradient.numel() // width
    partial_rows = 0
    # A block sums the columns of a warp. The kernel's own threshold is a block for
    # every second SM.
    column_blocks = width // _WARP
    if rows > _PARTIAL_ROWS_FROM and column_blocks < _SMS // 2:
        partial_rows = min(
            ceil_divide(rows, _ROWS_PER_PARTIAL), _MAX_PARTIAL_VALUES // width
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


def _reduction_requests(rows: int, columns: int, dtype: torch.dtype) -> Requests:
    """Return the requests of a sum over rows, if thread blocks share its columns."""
    parts = _count_parts(columns * rows * dtype.itemsize)
    sums_bytes = 0
    if parts > 1 and dtype != torch.float32:
        # The sums of the parts are added up in fp32.
        sums_bytes = _FP32_BYTES * columns
    sums = Block(sums_bytes)
    staged = Block(_staged_bytes(rows // parts, columns))
    return (sums, staged, staged, sums)


def _count_parts(size_bytes: int) -> int:
    """Return the number of parts into which halving divides a large tensor."""
    parts = 1
    while size_bytes > _LARGEST_OFFSET_BYTES * parts:
        parts *= 2
    return parts


def _staged_bytes(rows: int, columns: int) -> int:
    """Return the memory in which thread blocks exchange the sums of shared columns.

    Returns:
        0 if no two blocks share a column.
    """
    vector = math.gcd(columns, _VECTOR)
    threads = _BLOCK_THREADS * _VECTOR // vector
    width = min(_power_of_two_within(columns // vector), _WARP)
    height = min(_power_of_two_within(max(1, rows)), threads // width)
    values_per_thread = ceil_divide(rows, height)
    blocks = ceil_divide(columns, vector * width)
    running_blocks = _SMS * (_THREADS_PER_SM // (width * height))
    # As many blocks share a column as run at once, unless each of their threads would
    # have too few values, or too many.
    blocks_per_column = max(
        min(
            ceil_divide(running_blocks, blocks),
            ceil_divide(values_per_thread, _MIN_VALUES_PER_THREAD),
        ),
        ceil_divide(values_per_thread, _MAX_VALUES_PER_THREAD),
    )
    is_shared = (
        values_per_thread >= _MAX_VALUES_PER_THREAD
        and blocks <= running_blocks
        and blocks_per_column > 1
    )
    if not is_shared:
        return 0
    return _FP32_BYTES * columns * blocks_per_column * width * vector


def _power_of_two_within(number: int) -> int:
    """Return the largest power of two that does not exceed a positive number."""
    return 1 << number.bit_length() - 1
