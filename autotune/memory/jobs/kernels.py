"""Attention kernels by device, and the memory that kernels allocate internally.

Shapes: B sequences, H heads, S query positions of a sequence, E dimensions of a head.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from autotune.memory.decide.memory_model import DeviceKind
from autotune.memory.jobs.allocation_recorder import OUTPUTS, Block, Requests, Within
from trainer.config.train_config import Attention

aten = torch.ops.aten

_TILE = 16
"""Tile in which the memory-efficient attention kernel reads masks."""
_MOST_FLASH_WIDTH, _ALIGNED_BYTES = 256, 16
"""Widest head of FlashAttention, and alignment of heads in the memory-efficient
kernel."""
_FLASH_ROWS, _FLASH_WIDTH = 128, 32
"""FlashAttention 2's backward accumulates gradients of queries in fp32, with every
document rounded up to a multiple of this many positions, and heads to a multiple of
this many dimensions."""
_INT64_BYTES, _FP32_BYTES = 8, 4
_MOST_SIMPLE_INDICES, _MOST_SIMPLE_WEIGHTS = 3072, 527
"""Most indices for which an embedding's backward needs no memory; most weights for
which it needs only counts."""
_SEGMENT_INDICES = 10
"""Indices per partial sum in an embedding's backward: NROWS_PER_THREAD in
EmbeddingBackwardKernel.cu."""
_MULTIPROCESSORS, _THREADS_OF_ONE = 132, 2048
"""SMs of an H100 or H200, and threads per SM; they affect short reductions only: long
ones take 256 values a thread."""
_BLOCK_THREADS, _WARP, _VECTOR = 128, 32, 4
_VALUES_A_THREAD = 16, 256
"""Least and most values per thread of a reduction, in Reduce.cuh."""
_LARGEST_OFFSET_BYTES = 2**31 - 1
"""Largest tensor that is reduced at once; larger ones are halved."""
_PARTIAL_ROWS_FROM, _PARTIAL_VALUES = 64 * 1024, 2**20
"""Rows above which a layer norm's backward keeps partial sums, and the most values in
them."""


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

    ``explicit`` computes attention with explicit weights; other arguments are those of
    ``scaled_dot_product_attention``, with an additive mask.
    """
    options: dict[str, Any]
    if not cuda:
        if dropout > 0:  # the CPU's kernel has none
            return explicit(query, key, value, mask, dropout, causal, scale=scale)
        call, options = (
            aten._scaled_dot_product_flash_attention_for_cpu,
            {"attn_mask": mask},
        )
    elif (
        mask is None
        and query.dtype == torch.bfloat16
        and query.shape[-1] <= _MOST_FLASH_WIDTH
    ):
        call, options = (
            aten._scaled_dot_product_flash_attention,
            {"return_debug_mask": False},
        )
    # No fused kernel takes such heads.
    elif query.shape[-1] * query.element_size() % _ALIGNED_BYTES:
        return explicit(query, key, value, mask, dropout, causal, scale=scale)
    else:
        if mask is not None:
            places = mask.shape[-1]
            if places % _TILE:
                mask = functional.pad(mask, (0, _TILE - places % _TILE))[..., :places]
            mask = mask.expand(
                query.shape[0], query.shape[1], query.shape[2], key.shape[2]
            )
        keeps = torch.is_grad_enabled() and query.requires_grad
        call, options = (
            aten._scaled_dot_product_efficient_attention,
            {"attn_bias": mask, "compute_log_sumexp": keeps},
        )
    results: tuple[torch.Tensor, ...] = call(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, **options
    )
    return results[0]


def within_kernels(
    kind: DeviceKind, attention: Attention = "auto"
) -> dict[Any, Within]:
    """Return the allocator requests of each operator besides its results, in order.

    CUDA's are those of torch 2.11 to 2.14, recorded from the caching allocator, and of
    FlashAttention 3, read from its source; requests of a few KiB are left out.
    """
    if kind == "cpu":
        return dict.fromkeys(_PROMOTING, _promoted)
    found: dict[Any, Within] = {
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
        found[torch.ops.torch_attn._varlen_attn_backward.default] = varlen
    return found


_PROMOTING = tuple(
    getattr(aten, name).Tensor
    for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
)


def _promoted(one: torch.Tensor, other: object, *_: object, **__: object) -> Requests:
    # If dtypes differ, a CPU first copies to the wider one; CUDA converts while
    # reading.
    if not isinstance(other, torch.Tensor) or one.dtype == other.dtype:
        return ()
    wider = torch.result_type(one, other)
    narrow = [
        operand for operand in (one, other) if operand.dtype != wider and operand.dim()
    ]
    copied = Block(sum(operand.numel() * wider.itemsize for operand in narrow))
    return (OUTPUTS, copied, copied)


def _flash_backward(
    _: torch.Tensor, query: torch.Tensor, *__: object, **___: object
) -> Requests:
    # A number per position, and gradients of queries in fp32: mha_bwd in torch's
    # flash_api.cpp.
    batch, heads, rows, width = query.shape
    return _accumulated(batch * _up(rows, _FLASH_ROWS), heads, width)


def _varlen_backward(
    _: torch.Tensor, query: torch.Tensor, *others: object, **__: object
) -> Requests:
    # The same, every document rounded up: mha_varlen_bwd.
    rows, heads, width = query.shape
    edges = next(
        one
        for one in others
        if isinstance(one, torch.Tensor) and one.dtype == torch.int32
    )
    return _accumulated(rows + _FLASH_ROWS * (edges.numel() - 1), heads, width)


def _fa3_backward(
    _: torch.Tensor, query: torch.Tensor, *others: object, **__: object
) -> Requests:
    # Two numbers per position, and longer heads: mha_bwd in hopper/flash_api.cpp; all
    # released by Python, in order.
    rows, heads, width = query.shape
    edges = next(
        one
        for one in others
        if isinstance(one, torch.Tensor) and one.dtype == torch.int32
    )
    padded = next(size for size in (64, 96, 128, 192, 256) if width <= size)
    block = {64: 128, 128: 80}.get(padded, 64)
    numbers, again = (
        Block(_FP32_BYTES * heads * _up(rows + block * (edges.numel() - 1), block))
        for _ in range(2)
    )
    sums = Block(numbers.size_bytes * padded)
    return (OUTPUTS, numbers, again, sums, numbers, again, sums)


def _accumulated(rows: int, heads: int, width: int) -> Requests:
    numbers = Block(_FP32_BYTES * rows * heads)
    sums = Block(numbers.size_bytes * _up(width, _FLASH_WIDTH))
    return (OUTPUTS, numbers, sums, sums, numbers)


def _efficient_backward(
    _: torch.Tensor, query: torch.Tensor, *__: object, **___: object
) -> Requests:
    # A number per position, and gradients of queries in blocks with a header of 16
    # bytes: kernel_backward.h.
    batch, heads, rows, width = query.shape
    delta = Block(_FP32_BYTES * batch * heads * rows)
    padded = 64 if width <= 64 else 128
    block_rows = 128 if padded == 128 and query.dtype != torch.float32 else 64
    blocks = batch * heads * -(-rows // block_rows)
    workspace = Block(blocks * (block_rows * padded * _FP32_BYTES + 16))
    # No fused kernel multiplies gradients with results.
    if query.dtype == torch.float32:
        product, copied = Block(_FP32_BYTES * query.numel()), Block(delta.size_bytes)
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
    count = indices.numel() if indices.numel() > _MOST_SIMPLE_INDICES else 0
    ids, again, ordered, offsets, unique = (
        Block(_INT64_BYTES * count) for _ in range(5)
    )
    sorting = Block(2 * ids.size_bytes + ids.size_bytes // 32)
    segments = min(count, weights)
    sizes, ends = (Block(_INT64_BYTES * segments) for _ in range(2))
    partials = (count // _SEGMENT_INDICES + segments) if count else 0
    starts = Block(_INT64_BYTES * partials)
    small = weights <= _MOST_SIMPLE_WEIGHTS
    sums = Block(
        starts.size_bytes if small else _FP32_BYTES * partials * gradient.shape[-1]
    )
    before = (ids, again, ordered, sorting, sorting, ordered)
    after = (
        offsets,
        unique,
        unique,
        sizes,
        ends,
        starts,
        sums,
        sums,
        starts,
        ends,
        sizes,
        offsets,
        again,
        ids,
    )
    return (*before, OUTPUTS, *after)


def _layer_norm_backward(gradient: torch.Tensor, *others: Any, **_: object) -> Requests:
    width = math.prod(others[1])
    rows, wanted = gradient.numel() // width, sum(others[-1][1:])
    keeps = rows > _PARTIAL_ROWS_FROM and width // _WARP < _MULTIPROCESSORS // 2
    partial_rows = min(-(-rows // 32), _PARTIAL_VALUES // width) if keeps else 0
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
        or sorted(one % tensor.dim() for one in dims or ()) != leading
        or not tensor.is_contiguous()
    ):
        return ()
    columns = tensor.shape[-1]
    return (OUTPUTS, *_reduction(tensor.numel() // columns, columns, tensor.dtype))


def _reduction(rows: int, columns: int, dtype: torch.dtype) -> Requests:
    """Return the requests of a sum over rows if several thread blocks share a column."""
    parts = 1
    while columns * rows * dtype.itemsize > _LARGEST_OFFSET_BYTES * parts:
        parts *= 2
    least, most = _VALUES_A_THREAD
    vector = math.gcd(columns, _VECTOR)
    threads = _BLOCK_THREADS * _VECTOR // vector
    # The largest powers of two that do not exceed the numbers of vectors and rows.
    width = min(1 << (columns // vector).bit_length() - 1, _WARP)
    height = min(1 << max(1, rows // parts).bit_length() - 1, threads // width)
    values = -(-(rows // parts) // height)
    blocks = -(-columns // (vector * width))
    filled = _MULTIPROCESSORS * (_THREADS_OF_ONE // (width * height))
    shares = max(min(-(-filled // blocks), -(-values // least)), -(-values // most))
    alone = values < most or blocks > filled or shares == 1
    staged = Block(0 if alone else _FP32_BYTES * columns * shares * width * vector)
    sums = Block(_FP32_BYTES * columns if parts > 1 and dtype != torch.float32 else 0)
    return (sums, staged, staged, sums)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
