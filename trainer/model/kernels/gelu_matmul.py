"""The MLP of BERT's layers, whose matmuls compute GELU and its gradient as they store.

For backward it keeps GELU's input but not its result, which is computed again together
with the gradient.

Shapes: D hidden, I of the intermediate layer, P rows of partial sums; all other
dimensions are rows.
"""

from typing import Any

import torch
from torch.nn import functional

TILE_ROWS = 128
"""Rows of a tile, which has one row of partial sums."""


def gelu_mlp(
    input: torch.Tensor,
    first_weight_ID: torch.Tensor,
    first_bias_I: torch.Tensor,
    second_weight_DI: torch.Tensor,
    second_bias_D: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of a linear layer, GELU and another linear layer.

    Args:
        input: Input of the MLP, in the dtype of its weights, shape (…, D).
        first_weight_ID: Weight of the linear layer before GELU.
        first_bias_I: Bias of that layer.
        second_weight_DI: Weight of the linear layer after GELU.
        second_bias_D: Bias of that layer; None to leave it out.

    Returns:
        Result of the second layer, shape (…, D).
    """
    result: torch.Tensor = _GeluMlp.apply(
        input,
        first_weight_ID,
        first_bias_I,
        second_weight_DI,
        second_bias_D,
        torch.is_grad_enabled(),
    )  # type: ignore[no-untyped-call]
    return result


class _GeluMlp(torch.autograd.Function):
    """Autograd of ``gelu_mlp``; matmuls without GELU are torch's own."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        first_weight_ID: torch.Tensor,
        first_bias_I: torch.Tensor,
        second_weight_DI: torch.Tensor,
        second_bias_D: torch.Tensor | None,
        keeps_input: bool,
    ) -> torch.Tensor:
        rows_RD = input.reshape(-1, input.shape[-1])
        activation_RI, before_gelu_RI = linear_gelu(
            rows_RD, first_weight_ID, first_bias_I, keeps_input
        )
        if keeps_input:
            ctx.save_for_backward(
                rows_RD, before_gelu_RI, first_weight_ID, second_weight_DI
            )
            ctx.has_second_bias = second_bias_D is not None
        result_RD = functional.linear(activation_RI, second_weight_DI, second_bias_D)
        return result_RD.reshape(input.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RD, before_gelu_RI, first_weight_ID, second_weight_DI = ctx.saved_tensors
        (gradient,) = gradients
        gradient_RD = gradient.reshape(rows_RD.shape)
        before_gradient_RI, activation_RI, bias_gradient_I = gelu_linear_backward(
            gradient_RD, second_weight_DI, before_gelu_RI
        )
        return (
            torch.mm(before_gradient_RI, first_weight_ID).reshape(gradient.shape),
            torch.mm(before_gradient_RI.t(), rows_RD),
            bias_gradient_I,
            torch.mm(gradient_RD.t(), activation_RI),
            gradient_RD.sum(0) if ctx.has_second_bias else None,
            None,
        )


@torch.library.custom_op("trainer::linear_gelu", mutates_args=())
def linear_gelu(
    input_RD: torch.Tensor,
    weight_ID: torch.Tensor,
    bias_I: torch.Tensor,
    keeps_input: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GELU of a linear layer's result, and that result.

    Args:
        input_RD: Input of the layer.
        weight_ID: Weight of the layer.
        bias_I: Bias of the layer.
        keeps_input: True to return GELU's input, which backward needs.

    Returns:
        GELU and its input, shapes (R, I); its input is empty unless it is needed.
    """
    from trainer.model.kernels import gelu_matmul_triton

    outputs = _allocate_activation(input_RD, weight_ID, keeps_input)
    gelu_matmul_triton.forward(
        input_RD.contiguous(), weight_ID.contiguous(), bias_I.contiguous(), outputs
    )
    return outputs


@linear_gelu.register_fake
def _linear_gelu_without_content(
    input_RD: torch.Tensor,
    weight_ID: torch.Tensor,
    bias_I: torch.Tensor,
    keeps_input: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate_activation(input_RD, weight_ID, keeps_input)


def _allocate_activation(
    input_RD: torch.Tensor, weight_ID: torch.Tensor, keeps_input: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of ``linear_gelu`` before they are computed."""
    shape = (len(input_RD), len(weight_ID))
    return (
        input_RD.new_empty(shape),
        input_RD.new_empty(shape if keeps_input else (0, 0)),
    )


@torch.library.custom_op("trainer::gelu_linear_backward", mutates_args=())
def gelu_linear_backward(
    gradient_RD: torch.Tensor, weight_DI: torch.Tensor, before_gelu_RI: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of GELU's input, GELU, and the gradient of its bias.

    Args:
        gradient_RD: Gradient of the result of the linear layer after GELU.
        weight_DI: Weight of that layer.
        before_gelu_RI: GELU's input.

    Returns:
        Gradient and GELU, shapes (R, I), and the sum of the gradient over all rows,
        shape (I,).
    """
    from trainer.model.kernels import gelu_matmul_triton

    outputs = _allocate_gradients(before_gelu_RI)
    sums_PI = before_gelu_RI.new_empty(
        row_sums_shape(before_gelu_RI), dtype=torch.float32
    )
    gelu_matmul_triton.backward(
        gradient_RD.contiguous(),
        weight_DI.contiguous(),
        before_gelu_RI,
        outputs,
        sums_PI,
    )
    return outputs


@gelu_linear_backward.register_fake
def _gelu_linear_backward_without_content(
    gradient_RD: torch.Tensor, weight_DI: torch.Tensor, before_gelu_RI: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _allocate_gradients(before_gelu_RI)


def _allocate_gradients(
    before_gelu_RI: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of ``gelu_linear_backward`` before they are computed."""
    shape = before_gelu_RI.shape
    return (
        before_gelu_RI.new_empty(shape),
        before_gelu_RI.new_empty(shape),
        before_gelu_RI.new_empty(shape[-1]),
    )


def row_sums_shape(before_gelu_RI: torch.Tensor) -> tuple[int, int]:
    """Return the shape (P, I) of the partial sums of backward, which are in fp32.

    Each tile writes a part of one row of them.
    """
    rows, columns = before_gelu_RI.shape
    return -(-rows // TILE_ROWS), columns
