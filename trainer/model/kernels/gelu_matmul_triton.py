"""Matmuls whose results go through GELU, or its gradient, before they are stored.

A program computes one tile of the result. GELU is exact up to the precision of fp32, as
torch's own, and not its approximation by tanh.

Shapes: R rows and C columns of a tile, K inner elements of a step of its matmul.
"""

from typing import Any

import torch
import triton
from triton import language as tl

from trainer.model.kernels.gelu_matmul import TILE_ROWS

_TILE_COLUMNS = 128
_TILE_INNER = 64
_GROUP = 8
"""Row tiles whose programs run next to each other, so that they share columns of the
second factor in the L2 cache."""
_LAUNCH = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
"""With 128 registers a thread, two programs fit on an SM of Hopper: one multiplies
while the other stores its tile, which takes about as long. Not measured."""
_SUMMED_ROWS, _SUMMED_COLUMNS = 64, 16
"""Tile of partial sums that a program adds up at once: narrow, as columns are few."""

_ERFC_SCALE = tl.constexpr(0.3275911 * 0.5**0.5)
_ERFC_1 = tl.constexpr(0.5 * 0.254829592)
_ERFC_2 = tl.constexpr(0.5 * -0.284496736)
_ERFC_3 = tl.constexpr(0.5 * 1.421413741)
_ERFC_4 = tl.constexpr(0.5 * -1.453152027)
_ERFC_5 = tl.constexpr(0.5 * 1.061405429)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NORMAL_DENSITY = tl.constexpr(0.3989422804014327)
"""Density of the normal distribution at 0, 1 / sqrt(2 pi)."""


def forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Compute into ``outputs``, as ``linear_gelu`` returns them."""
    activation, before_gelu = outputs
    columns, inner = weight.shape
    rows = input.numel() // inner
    linear_gelu_kernel[_grid(rows, columns)](
        input,
        weight,
        bias,
        activation,
        before_gelu,
        rows,
        COLUMNS=columns,
        INNER=inner,
        KEEPS_BEFORE_GELU=before_gelu.numel() > 0,
        **_tile(),
    )


def backward(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    before_gelu: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    partial_sums: torch.Tensor,
) -> None:
    """Compute into ``outputs``, as ``gelu_linear_backward`` returns them.

    Args:
        gradient: As ``gelu_linear_backward`` gets it, like what follows.
        weight: Weight of the layer after GELU.
        before_gelu: Input of GELU.
        outputs: Tensors for the results.
        partial_sums: Memory for the sums over each tile's rows.
    """
    before_gradient, activation, bias_gradient = outputs
    inner, columns = weight.shape
    rows = gradient.numel() // inner
    gelu_linear_backward_kernel[_grid(rows, columns)](
        gradient,
        weight,
        before_gelu,
        before_gradient,
        activation,
        partial_sums,
        rows,
        COLUMNS=columns,
        INNER=inner,
        **_tile(),
    )
    sum_rows_kernel[(triton.cdiv(columns, _SUMMED_COLUMNS),)](
        partial_sums,
        bias_gradient,
        len(partial_sums),
        COLUMNS=columns,
        TILE_ROWS=_SUMMED_ROWS,
        TILE_COLUMNS=_SUMMED_COLUMNS,
    )


def _grid(rows: int, columns: int) -> tuple[int]:
    return (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, _TILE_COLUMNS),)


def _tile() -> dict[str, Any]:
    return {
        "TILE_ROWS": TILE_ROWS,
        "TILE_COLUMNS": _TILE_COLUMNS,
        "TILE_INNER": _TILE_INNER,
        "GROUP": _GROUP,
        **_LAUNCH,
    }


@triton.jit
def _find_tile(
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Return the row and the column of this program's tile, counted in tiles."""
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    column_tiles: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    programs_of_group: tl.constexpr = GROUP * column_tiles
    program = tl.program_id(0)
    first_row = program // programs_of_group * GROUP
    group_rows = min(row_tiles - first_row, GROUP)
    program_in_group = program % programs_of_group
    return first_row + program_in_group % group_rows, program_in_group // group_rows


@triton.jit
def _multiply(
    first_pointer: tl.tensor,
    second_pointer: tl.tensor,
    row_R: tl.tensor,
    column_C: tl.tensor,
    rows: tl.tensor,
    INNER_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
) -> tl.tensor:
    """Return a tile of the product of two matrices, in fp32, shape (R, C).

    Rows and columns beyond the matrices are those of other tiles, as loads without a
    condition are faster; they must not be stored.
    """
    inner_K = tl.arange(0, TILE_INNER)
    row_start_R = (row_R % rows).to(tl.int64) * INNER
    first = first_pointer + row_start_R[:, None] + inner_K[None, :]
    second = second_pointer + (
        inner_K[:, None] * INNER_STRIDE + (column_C % COLUMNS)[None, :] * COLUMN_STRIDE
    )
    product = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for start in range(0, INNER, TILE_INNER):
        if INNER % TILE_INNER == 0:
            first_tile = tl.load(first)
            second_tile = tl.load(second)
        else:
            in_row_K = inner_K < INNER - start
            first_tile = tl.load(first, in_row_K[None, :], other=0.0)
            second_tile = tl.load(second, in_row_K[:, None], other=0.0)
        product = tl.dot(first_tile, second_tile, product)
        first += TILE_INNER
        second += TILE_INNER * INNER_STRIDE
    return product


@triton.jit
def _normal_distribution(value: tl.tensor) -> tl.tensor:
    """Return the normal distribution function and its density.

    Formula 7.1.26 of Abramowitz and Stegun gives the tail, with an error below 1e-7, so
    that the tail of negative values is precise too.
    """
    exponential = tl.exp2(value * value * (-0.5 * _LOG2_E))
    factor = 1.0 / (1.0 + _ERFC_SCALE * tl.abs(value))
    tail = _ERFC_5 * factor + _ERFC_4
    tail = tail * factor + _ERFC_3
    tail = tail * factor + _ERFC_2
    tail = tail * factor + _ERFC_1
    tail = tail * factor * exponential
    return tl.where(value < 0, tail, 1.0 - tail), _NORMAL_DENSITY * exponential


@triton.jit
def _halve(tile: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Return the left and the right half of a tile."""
    halves = tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
    return tl.split(halves)


@triton.jit
def linear_gelu_kernel(
    input_pointer: tl.tensor,
    weight_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    activation_pointer: tl.tensor,
    before_gelu_pointer: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    KEEPS_BEFORE_GELU: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Compute one tile of GELU of a linear layer's result."""
    row, column = _find_tile(rows, COLUMNS, TILE_ROWS, TILE_COLUMNS, GROUP)
    row_R = row * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first_column = column * TILE_COLUMNS
    value = _multiply(
        input_pointer,
        weight_pointer,
        row_R,
        first_column + tl.arange(0, TILE_COLUMNS),
        rows,
        1,
        INNER,
        COLUMNS,
        INNER,
        TILE_ROWS,
        TILE_COLUMNS,
        TILE_INNER,
    )
    for half in tl.static_range(2):
        left, right = _halve(value, TILE_ROWS, TILE_COLUMNS)
        _store_gelu(
            left if half == 0 else right,
            bias_pointer,
            activation_pointer,
            before_gelu_pointer,
            row_R,
            first_column + half * (TILE_COLUMNS // 2),
            rows,
            COLUMNS,
            KEEPS_BEFORE_GELU,
            TILE_COLUMNS // 2,
        )


@triton.jit
def _store_gelu(
    value: tl.tensor,
    bias_pointer: tl.tensor,
    activation_pointer: tl.tensor,
    before_gelu_pointer: tl.tensor,
    row_R: tl.tensor,
    first_column: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    KEEPS_BEFORE_GELU: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Store GELU of a part of a tile, and what it is computed from."""
    column_C = first_column + tl.arange(0, TILE_COLUMNS)
    bias_C = tl.load(bias_pointer + column_C, column_C < COLUMNS, other=0.0)
    value += bias_C.to(tl.float32)[None, :]
    valid = (row_R < rows)[:, None] & (column_C < COLUMNS)[None, :]
    element = row_R.to(tl.int64)[:, None] * COLUMNS + column_C[None, :]
    # Backward computes GELU again from what is stored.
    stored = value.to(activation_pointer.dtype.element_ty)
    if KEEPS_BEFORE_GELU:
        tl.store(before_gelu_pointer + element, stored, valid)
    value = stored.to(tl.float32)
    distribution, _ = _normal_distribution(value)
    tl.store(activation_pointer + element, value * distribution, valid)


@triton.jit
def gelu_linear_backward_kernel(
    gradient_pointer: tl.tensor,
    weight_pointer: tl.tensor,
    before_gelu_pointer: tl.tensor,
    before_gradient_pointer: tl.tensor,
    activation_pointer: tl.tensor,
    partial_sums_pointer: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Compute one tile of the gradient of GELU's input, and GELU again."""
    row, column = _find_tile(rows, COLUMNS, TILE_ROWS, TILE_COLUMNS, GROUP)
    row_R = row * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first_column = column * TILE_COLUMNS
    gradient = _multiply(
        gradient_pointer,
        weight_pointer,
        row_R,
        first_column + tl.arange(0, TILE_COLUMNS),
        rows,
        COLUMNS,
        1,
        COLUMNS,
        INNER,
        TILE_ROWS,
        TILE_COLUMNS,
        TILE_INNER,
    )
    for half in tl.static_range(2):
        left, right = _halve(gradient, TILE_ROWS, TILE_COLUMNS)
        _store_gradient(
            left if half == 0 else right,
            before_gelu_pointer,
            before_gradient_pointer,
            activation_pointer,
            partial_sums_pointer + row * COLUMNS,
            row_R,
            first_column + half * (TILE_COLUMNS // 2),
            rows,
            COLUMNS,
            TILE_COLUMNS // 2,
        )


@triton.jit
def _store_gradient(
    gradient: tl.tensor,
    before_gelu_pointer: tl.tensor,
    before_gradient_pointer: tl.tensor,
    activation_pointer: tl.tensor,
    sums_pointer: tl.tensor,
    row_R: tl.tensor,
    first_column: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Store the gradient of GELU's input in a part of a tile, its sums and GELU."""
    column_C = first_column + tl.arange(0, TILE_COLUMNS)
    valid = (row_R < rows)[:, None] & (column_C < COLUMNS)[None, :]
    element = row_R.to(tl.int64)[:, None] * COLUMNS + column_C[None, :]
    value = tl.load(before_gelu_pointer + element, valid, other=0.0).to(tl.float32)
    distribution, density = _normal_distribution(value)
    tl.store(activation_pointer + element, value * distribution, valid)
    gradient *= distribution + value * density
    tl.store(before_gradient_pointer + element, gradient, valid)
    sum_C = tl.sum(tl.where(valid, gradient, 0.0), axis=0)
    tl.store(sums_pointer + column_C, sum_C, column_C < COLUMNS)


@triton.jit
def sum_rows_kernel(
    partial_sums_pointer: tl.tensor,
    sum_pointer: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Add up some columns of all partial sums."""
    column_C = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    in_row_C = column_C < COLUMNS
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for first_row in range(0, rows, TILE_ROWS):
        row_R = first_row + tl.arange(0, TILE_ROWS)
        valid = (row_R < rows)[:, None] & in_row_C[None, :]
        element = row_R[:, None] * COLUMNS + column_C[None, :]
        total += tl.load(partial_sums_pointer + element, valid, other=0.0)
    tl.store(sum_pointer + column_C, tl.sum(total, axis=0), in_row_C)
