"""Dropout, residual sum and layer norm in one kernel, and their gradients in another.

A program computes tiles of a few whole rows, which it reads and writes once. Sums are
in fp32.

Shapes: R rows of a tile, C columns of a row, rounded up to a power of two.
"""

import functools

import torch
import triton
from triton import language as tl

_TILE_ROWS = 4
_TILE_ELEMENTS = 8192
"""Most elements of a tile: 16 for each thread, or 32 in wide rows. Not measured."""
_COLUMNS_PER_WARP = 128
"""Columns of a row that a warp computes: each of its threads loads four at once, and
all rows of these columns, so that sums over rows need no exchange."""
_MAX_WARPS = 16
_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 16
"""Tile of partial sums that a program adds up at once: narrow, as columns are few."""
_WORDS = tl.constexpr(4)
"""Random numbers that one evaluation of Philox gives (Salmon et al. 2011)."""


def forward(
    projection: torch.Tensor,
    projection_bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seed: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    dropout: float,
    eps: float,
) -> None:
    """Compute into ``outputs``, as ``residual_norm`` returns them.

    Outputs without elements are not computed.
    """
    result, narrow_result, normal, scale = outputs
    columns = projection.shape[-1]
    rows = projection.numel() // columns
    tile = _tile(columns)
    grid = (triton.cdiv(rows, tile["TILE_ROWS"]),)
    residual_norm_forward_kernel[grid](
        projection,
        projection_bias,
        residual,
        weight,
        bias,
        seed,
        result,
        narrow_result,
        normal,
        scale,
        rows,
        eps,
        1 / (1 - dropout),
        COLUMNS=columns,
        THRESHOLD=_threshold(dropout),
        HAS_NARROW_RESULT=narrow_result.numel() > 0,
        KEEPS_NORMAL=normal.numel() > 0,
        **tile,
    )


def backward(
    result_gradient: torch.Tensor,
    narrow_gradient: torch.Tensor | None,
    normal: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    seed: torch.Tensor | None,
    outputs: tuple[torch.Tensor, ...],
    partial_sums: torch.Tensor,
    *,
    dropout: float,
) -> None:
    """Compute into ``outputs``, as ``residual_norm_backward`` returns them.

    Args:
        result_gradient: As ``residual_norm_backward`` gets it, like what follows.
        narrow_gradient: Gradient of the result for matmuls.
        normal: Normalised sum.
        scale: Factors of rows.
        weight: Weight of the norm.
        seed: Seed of dropout.
        outputs: Tensors for the gradients.
        partial_sums: Memory for partial sums, whose rows are as many as programs.
        dropout: Probability of a zero.
    """
    projection_gradient, projection_bias_gradient, residual_gradient, *sums = outputs
    columns = normal.shape[-1]
    residual_norm_backward_kernel[(len(partial_sums),)](
        result_gradient,
        narrow_gradient,
        normal,
        scale,
        weight,
        seed,
        projection_gradient,
        residual_gradient,
        partial_sums,
        normal.numel() // columns,
        1 / (1 - dropout),
        COLUMNS=columns,
        THRESHOLD=_threshold(dropout),
        HAS_NARROW_GRADIENT=narrow_gradient is not None,
        HAS_PROJECTION_GRADIENT=projection_gradient.numel() > 0,
        **_tile(columns),
    )
    weight_gradient, bias_gradient = sums
    add_partial_sums_kernel[(triton.cdiv(columns, _SUMMED_COLUMNS),)](
        partial_sums,
        weight_gradient,
        bias_gradient,
        projection_bias_gradient,
        len(partial_sums),
        COLUMNS=columns,
        TILE_ROWS=_SUMMED_ROWS,
        TILE_COLUMNS=_SUMMED_COLUMNS,
    )


@functools.cache
def _tile(columns: int) -> dict[str, int]:
    """Return the sizes of a tile and the number of warps that compute it."""
    padded_columns = max(_COLUMNS_PER_WARP, triton.next_power_of_2(columns))
    return {
        "TILE_ROWS": max(1, min(_TILE_ROWS, _TILE_ELEMENTS // padded_columns)),
        "TILE_COLUMNS": padded_columns,
        "num_warps": min(_MAX_WARPS, padded_columns // _COLUMNS_PER_WARP),
    }


def _threshold(dropout: float) -> int:
    """Return the smallest of the 2**32 random numbers that keeps an element."""
    return min(round(dropout * 2**32), 2**32 - 1)


@triton.jit
def _draw_kept(
    seed: tl.tensor,
    row_R: tl.tensor,
    THRESHOLD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return whether dropout keeps each element of some rows, shape (R, C).

    The random number of an element depends only on the seed, its row and its column, so
    that backward draws the mask of forward. Rows and columns are separate counters,
    which do not overflow.
    """
    counter = tl.arange(0, TILE_COLUMNS // _WORDS)[None, :]
    row, counter = tl.broadcast(row_R.to(tl.uint32)[:, None], counter.to(tl.uint32))
    zero = tl.zeros_like(row)
    first, second, third, fourth = tl.philox(seed, row, counter, zero, zero)
    threshold = tl.full((), THRESHOLD, tl.uint32)
    # Four adjacent columns share an evaluation, and a thread.
    kept = tl.join(
        tl.join(first >= threshold, third >= threshold),
        tl.join(second >= threshold, fourth >= threshold),
    )
    return tl.reshape(kept, (TILE_ROWS, TILE_COLUMNS))


@triton.jit
def residual_norm_forward_kernel(
    projection_pointer: tl.tensor,
    projection_bias_pointer: tl.tensor,
    residual_pointer: tl.tensor,
    weight_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    seed_pointer: tl.tensor,
    result_pointer: tl.tensor,
    narrow_result_pointer: tl.tensor,
    normal_pointer: tl.tensor,
    scale_pointer: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    kept_factor: tl.tensor,
    COLUMNS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    HAS_NARROW_RESULT: tl.constexpr,
    KEEPS_NORMAL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Compute one tile of the norm."""
    column_C = tl.arange(0, TILE_COLUMNS)
    in_row_C = column_C < COLUMNS
    row_R = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    in_rows_R = row_R < rows
    valid = in_rows_R[:, None] & in_row_C[None, :]
    # The number of elements may exceed 2**31.
    element = row_R.to(tl.int64)[:, None] * COLUMNS + column_C[None, :]

    value = tl.load(projection_pointer + element, valid, other=0.0).to(tl.float32)
    bias_C = tl.load(projection_bias_pointer + column_C, in_row_C, other=0.0)
    value += bias_C.to(tl.float32)[None, :]
    if THRESHOLD > 0:
        seed = tl.load(seed_pointer)
        kept = _draw_kept(seed, row_R, THRESHOLD, TILE_ROWS, TILE_COLUMNS)
        value = tl.where(kept, value * kept_factor, 0.0)
    value += tl.load(residual_pointer + element, valid, other=0.0).to(tl.float32)

    mean_R = tl.sum(value, axis=1) / COLUMNS
    centred = tl.where(in_row_C[None, :], value - mean_R[:, None], 0.0)
    variance_R = tl.sum(centred * centred, axis=1) / COLUMNS
    scale_R = tl.rsqrt(variance_R + eps)
    normal = centred * scale_R[:, None]

    weight_C = tl.load(weight_pointer + column_C, in_row_C, other=0.0)
    shift_C = tl.load(bias_pointer + column_C, in_row_C, other=0.0)
    result = normal * weight_C.to(tl.float32)[None, :]
    result += shift_C.to(tl.float32)[None, :]
    tl.store(result_pointer + element, result, valid)
    if HAS_NARROW_RESULT:
        tl.store(narrow_result_pointer + element, result, valid)
    if KEEPS_NORMAL:
        tl.store(normal_pointer + element, normal, valid)
        tl.store(scale_pointer + row_R, scale_R, in_rows_R)


@triton.jit
def residual_norm_backward_kernel(
    result_gradient_pointer: tl.tensor,
    narrow_gradient_pointer: tl.tensor,
    normal_pointer: tl.tensor,
    scale_pointer: tl.tensor,
    weight_pointer: tl.tensor,
    seed_pointer: tl.tensor,
    projection_gradient_pointer: tl.tensor,
    residual_gradient_pointer: tl.tensor,
    sums_pointer: tl.tensor,
    rows: tl.tensor,
    kept_factor: tl.tensor,
    COLUMNS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    HAS_NARROW_GRADIENT: tl.constexpr,
    HAS_PROJECTION_GRADIENT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Compute the gradients of some tiles, and their sums over rows."""
    column_C = tl.arange(0, TILE_COLUMNS)
    in_row_C = column_C < COLUMNS
    weight_C = tl.load(weight_pointer + column_C, in_row_C, other=0.0).to(tl.float32)
    weight_sum_C = tl.zeros((TILE_COLUMNS,), tl.float32)
    bias_sum_C = tl.zeros((TILE_COLUMNS,), tl.float32)
    projection_bias_sum_C = tl.zeros((TILE_COLUMNS,), tl.float32)

    tiles = tl.cdiv(rows, TILE_ROWS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_R = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        in_rows_R = row_R < rows
        valid = in_rows_R[:, None] & in_row_C[None, :]
        element = row_R.to(tl.int64)[:, None] * COLUMNS + column_C[None, :]

        gradient = tl.load(result_gradient_pointer + element, valid, other=0.0)
        gradient = gradient.to(tl.float32)
        if HAS_NARROW_GRADIENT:
            gradient += tl.load(narrow_gradient_pointer + element, valid, other=0.0).to(
                tl.float32
            )
        normal = tl.load(normal_pointer + element, valid, other=0.0).to(tl.float32)
        scale_R = tl.load(scale_pointer + row_R, in_rows_R, other=0.0)
        weight_sum_C += tl.sum(gradient * normal, axis=0)
        bias_sum_C += tl.sum(gradient, axis=0)

        # Each element of the input also changes the mean and the variance, which are
        # subtracted and divided by: these two terms are their shares of the gradient.
        weighted = gradient * weight_C[None, :]
        mean_term_R = tl.sum(weighted, axis=1) / COLUMNS
        variance_term_R = tl.sum(weighted * normal, axis=1) / COLUMNS
        gradient = weighted - mean_term_R[:, None] - normal * variance_term_R[:, None]
        gradient = tl.where(valid, gradient * scale_R[:, None], 0.0)
        tl.store(residual_gradient_pointer + element, gradient, valid)

        if THRESHOLD > 0:
            seed = tl.load(seed_pointer)
            kept = _draw_kept(seed, row_R, THRESHOLD, TILE_ROWS, TILE_COLUMNS)
            gradient = tl.where(kept, gradient * kept_factor, 0.0)
        projection_bias_sum_C += tl.sum(gradient, axis=0)
        if HAS_PROJECTION_GRADIENT:
            tl.store(projection_gradient_pointer + element, gradient, valid)

    sums_pointer += tl.program_id(0) * 3 * COLUMNS + column_C
    tl.store(sums_pointer, weight_sum_C, in_row_C)
    tl.store(sums_pointer + COLUMNS, bias_sum_C, in_row_C)
    tl.store(sums_pointer + 2 * COLUMNS, projection_bias_sum_C, in_row_C)


@triton.jit
def add_partial_sums_kernel(
    partial_sums_pointer: tl.tensor,
    weight_gradient_pointer: tl.tensor,
    bias_gradient_pointer: tl.tensor,
    projection_bias_gradient_pointer: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Add up some columns of the partial sums of all programs."""
    column_C = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_row_C = column_C < COLUMNS
    weight_sum = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    bias_sum = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    projection_bias_sum = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for first_row in range(0, rows, TILE_ROWS):
        row_R = first_row + tl.arange(0, TILE_ROWS)
        valid = (row_R < rows)[:, None] & in_row_C[None, :]
        pointer = (
            partial_sums_pointer + row_R[:, None] * 3 * COLUMNS + column_C[None, :]
        )
        weight_sum += tl.load(pointer, valid, other=0.0)
        bias_sum += tl.load(pointer + COLUMNS, valid, other=0.0)
        projection_bias_sum += tl.load(pointer + 2 * COLUMNS, valid, other=0.0)
    tl.store(weight_gradient_pointer + column_C, tl.sum(weight_sum, axis=0), in_row_C)
    tl.store(bias_gradient_pointer + column_C, tl.sum(bias_sum, axis=0), in_row_C)
    tl.store(
        projection_bias_gradient_pointer + column_C,
        tl.sum(projection_bias_sum, axis=0),
        in_row_C,
    )
