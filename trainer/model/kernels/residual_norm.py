"""Layer norm of a residual sum: ``LayerNorm(residual + dropout(projection + bias))``.

Forward and backward are one kernel each. The norm computes in fp32. For backward, it
keeps its normalised input in the dtype of the projection, and a seed instead of
dropout's mask.

Shapes: D hidden, P rows of S partial sums; all other dimensions are rows.
"""

from typing import Any

import torch

from trainer.model.kernels.multiprocessors import count_sms

_SEEDS = 2**63 - 1
_PROGRAMS_PER_SM = 2
"""Programs of backward for each SM, each of which writes one row of partial sums. One
computes while the other waits for memory. Not measured."""
_MIN_ROWS_PER_PROGRAM = 4
MAX_COLUMNS = 8192
"""Largest hidden size: a program holds whole rows in registers."""
_SUMS = 3
"""Gradients that are sums over all rows: of weight, bias and the projection's bias."""


def residual_norm(
    projection: torch.Tensor,
    projection_bias_D: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    *,
    eps: float,
    dropout: float = 0.0,
    seed: torch.Tensor | None = None,
    feeds_matmul: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the layer norm of a residual sum, and the same as input of a matmul.

    Args:
        projection: Result of a matmul without its bias, shape (…, D).
        projection_bias_D: Bias of that matmul.
        residual: The residual stream, shape (…, D).
        weight_D: Weight of the norm.
        bias_D: Bias of the norm.
        eps: Term that is added to the variance.
        dropout: Probability with which an element of the projection becomes 0.
        seed: Seed of dropout, as ``draw_seeds`` returns it; None draws one.
        feeds_matmul: True if the result is also the input of a matmul.

    Returns:
        The normalised sum in the dtype of the residual stream, and in the projection's
        if ``feeds_matmul``, else None; shapes (…, D). With a result for each use,
        backward gets their gradients without adding them up before.
    """
    if dropout == 0:
        seed = None
    elif seed is None:
        (seed,) = draw_seeds(1, projection.device)
    results: tuple[torch.Tensor, ...] = _ResidualNorm.apply(
        projection,
        projection_bias_D,
        residual,
        weight_D,
        bias_D,
        seed,
        dropout,
        eps,
        feeds_matmul,
        torch.is_grad_enabled(),
    )  # type: ignore[no-untyped-call]
    return results[0], results[1] if feeds_matmul else None


def draw_seeds(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return seeds for dropout on a device, which the host does not wait for.

    Args:
        count: Number of seeds.
        device: Device to draw them on.

    Returns:
        The seeds, each int64 of shape (1,).
    """
    # Only the first column is used: it keeps each seed at a multiple of 16 bytes, and
    # torch.compile copies inputs at any other address.
    seeds = torch.randint(_SEEDS, (count, 2), dtype=torch.int64, device=device)
    return tuple(row[:1] for row in seeds)


class _ResidualNorm(torch.autograd.Function):
    """Autograd of ``residual_norm``, whose kernels are operators."""

    @staticmethod
    def forward(
        ctx: Any,
        projection: torch.Tensor,
        projection_bias_D: torch.Tensor,
        residual: torch.Tensor,
        weight_D: torch.Tensor,
        bias_D: torch.Tensor,
        seed: torch.Tensor | None,
        dropout: float,
        eps: float,
        feeds_matmul: bool,
        keeps_normal: bool,
    ) -> tuple[torch.Tensor, ...]:
        result, narrow_result, normal, scale = residual_norm_forward(
            projection,
            projection_bias_D,
            residual,
            weight_D,
            bias_D,
            seed,
            dropout,
            eps,
            feeds_matmul and residual.dtype != projection.dtype,
            keeps_normal,
        )
        if keeps_normal:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(normal, scale, weight_D, seed)
            ctx.dropout = dropout
            ctx.projection_bias_dtype = projection_bias_D.dtype
        if not feeds_matmul:
            return (result,)
        if residual.dtype == projection.dtype:
            # The same memory, but a separate output with a separate gradient.
            narrow_result = result.view_as(result)
        return result, narrow_result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        normal, scale, weight_D, seed = ctx.saved_tensors
        result_gradient, narrow_gradient = (*gradients, None)[:2]
        if result_gradient is None:
            result_gradient, narrow_gradient = narrow_gradient, None
        (
            projection_gradient,
            projection_bias_gradient_D,
            residual_gradient,
            weight_gradient_D,
            bias_gradient_D,
        ) = residual_norm_backward(
            result_gradient,
            narrow_gradient,
            normal,
            scale,
            weight_D,
            seed,
            ctx.dropout,
            ctx.projection_bias_dtype,
        )
        if not projection_gradient.numel():
            projection_gradient = residual_gradient
        return (
            projection_gradient,
            projection_bias_gradient_D,
            residual_gradient,
            weight_gradient_D,
            bias_gradient_D,
            None,
            None,
            None,
            None,
            None,
        )


@torch.library.custom_op("trainer::residual_norm", mutates_args=())
def residual_norm_forward(
    projection: torch.Tensor,
    projection_bias_D: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    seed: torch.Tensor | None,
    dropout: float,
    eps: float,
    has_narrow_result: bool,
    keeps_normal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the norm in two dtypes, and what backward needs.

    Args:
        projection: As in ``residual_norm``, like all arguments that are not described.
        projection_bias_D: Bias.
        residual: The residual stream.
        weight_D: Weight of the norm.
        bias_D: Bias of the norm.
        seed: Seed of dropout, int64, shape (1,); None without dropout.
        dropout: Probability of a zero.
        eps: Term that is added to the variance.
        has_narrow_result: True to return the norm in the projection's dtype too.
        keeps_normal: True to return what backward needs.

    Returns:
        The norm in the dtype of the residual stream, and in the projection's. The
        normalised sum before weight and bias, in the projection's dtype, and the factor
        of each row that normalised it, in fp32. Results that are not asked for are
        empty.
    """
    from trainer.model.kernels import residual_norm_triton

    outputs = _allocate_outputs(projection, residual, has_narrow_result, keeps_normal)
    residual_norm_triton.forward(
        projection.contiguous(),
        projection_bias_D.contiguous(),
        residual.contiguous(),
        weight_D.contiguous(),
        bias_D.contiguous(),
        seed,
        outputs,
        dropout=dropout,
        eps=eps,
    )
    return outputs


@residual_norm_forward.register_fake
def _forward_without_content(
    projection: torch.Tensor,
    projection_bias_D: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor,
    seed: torch.Tensor | None,
    dropout: float,
    eps: float,
    has_narrow_result: bool,
    keeps_normal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _allocate_outputs(projection, residual, has_narrow_result, keeps_normal)


def _allocate_outputs(
    projection: torch.Tensor,
    residual: torch.Tensor,
    has_narrow_result: bool,
    keeps_normal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of ``residual_norm_forward`` before they are computed."""
    shape = projection.shape
    return (
        residual.new_empty(shape),
        projection.new_empty(shape if has_narrow_result else 0),
        projection.new_empty(shape if keeps_normal else 0),
        projection.new_empty(
            shape[:-1].numel() if keeps_normal else 0, dtype=torch.float32
        ),
    )


@torch.library.custom_op("trainer::residual_norm_backward", mutates_args=())
def residual_norm_backward(
    result_gradient: torch.Tensor,
    narrow_gradient: torch.Tensor | None,
    normal: torch.Tensor,
    scale: torch.Tensor,
    weight_D: torch.Tensor,
    seed: torch.Tensor | None,
    dropout: float,
    projection_bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the tensors that ``residual_norm`` gets.

    Args:
        result_gradient: Gradient of the norm's result; its dtype is the residual
            stream's.
        narrow_gradient: Gradient of the result that is the input of matmuls, if any.
        normal: The normalised sum, as ``residual_norm_forward`` returns it.
        scale: The factors of rows, as it returns them.
        weight_D: Weight of the norm.
        seed: Seed of forward.
        dropout: Probability of a zero.
        projection_bias_dtype: Dtype of the projection's bias.

    Returns:
        The gradients of projection, its bias, residual stream, weight and bias. That of
        the projection is empty if it equals the residual stream's.
    """
    from trainer.model.kernels import residual_norm_triton

    outputs = _allocate_gradients(
        result_gradient, normal, weight_D, dropout, projection_bias_dtype
    )
    sums_PSD = normal.new_empty(partial_sums_shape(normal), dtype=torch.float32)
    residual_norm_triton.backward(
        result_gradient.contiguous(),
        None if narrow_gradient is None else narrow_gradient.contiguous(),
        normal,
        scale,
        weight_D.contiguous(),
        seed,
        outputs,
        sums_PSD,
        dropout=dropout,
    )
    return outputs


@residual_norm_backward.register_fake
def _backward_without_content(
    result_gradient: torch.Tensor,
    narrow_gradient: torch.Tensor | None,
    normal: torch.Tensor,
    scale: torch.Tensor,
    weight_D: torch.Tensor,
    seed: torch.Tensor | None,
    dropout: float,
    projection_bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _allocate_gradients(
        result_gradient, normal, weight_D, dropout, projection_bias_dtype
    )


def _allocate_gradients(
    result_gradient: torch.Tensor,
    normal: torch.Tensor,
    weight_D: torch.Tensor,
    dropout: float,
    projection_bias_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of ``residual_norm_backward`` before they are computed."""
    shape = normal.shape
    are_equal = dropout == 0 and result_gradient.dtype == normal.dtype
    return (
        normal.new_empty(0 if are_equal else shape),
        weight_D.new_empty(shape[-1], dtype=projection_bias_dtype),
        result_gradient.new_empty(shape),
        weight_D.new_empty(shape[-1]),
        weight_D.new_empty(shape[-1]),
    )


def partial_sums_shape(normal: torch.Tensor) -> tuple[int, int, int]:
    """Return the shape (P, S, D) of the partial sums of backward, which are in fp32.

    Each program of backward writes one row of them.
    """
    *_, columns = normal.shape
    rows = normal.numel() // columns
    programs = _PROGRAMS_PER_SM * count_sms(normal.device)
    return max(1, min(programs, -(-rows // _MIN_ROWS_PER_PROGRAM))), _SUMS, columns
