"""The MLP with GELU in its matmuls and its gradients, compared with fp64."""

import pytest
import torch
from torch.nn import functional

from trainer.model.kernels import gelu_matmul as operators
from trainer.model.kernels.gelu_matmul import gelu_mlp

pytestmark = pytest.mark.interpreted

ERRORS = {torch.float32: 1e-6, torch.bfloat16: 2**-6}
"""Largest relative errors: of sums in another order, and of two truncations."""
TILE = 128
SHAPES = {
    "tails": (TILE + 37, 100, 200),
    "whole tiles": (2 * TILE, 64, 2 * TILE),
    "several groups": (9 * TILE + 1, 16, TILE + 8),
    "one row": (1, 128, 130),
}
"""Rows, hidden size and intermediate size."""


def make_inputs(shape, dtype):
    rows, hidden, intermediate = shape
    generator = torch.Generator().manual_seed(hidden)

    def draw(*size, deviation=1.0):
        values = torch.randn(*size, generator=generator) * deviation
        return values.to(dtype).requires_grad_()

    return [
        draw(rows, hidden, deviation=2.0),
        draw(intermediate, hidden, deviation=hidden**-0.5),
        draw(intermediate),
        draw(hidden, intermediate, deviation=intermediate**-0.5),
        draw(hidden),
    ]


def expected_mlp(input, first_weight, first_bias, second_weight, second_bias=None):
    hidden = functional.linear(input, first_weight, first_bias)
    return functional.linear(functional.gelu(hidden), second_weight, second_bias)


def relative_error(actual, expected):
    difference = actual.detach().double() - expected.detach()
    return float(difference.norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("has_second_bias", [True, False])
def test_mlp_and_gradients(shape, dtype, has_second_bias):
    inputs = make_inputs(shape, dtype)[: 5 if has_second_bias else 4]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    result, expected = gelu_mlp(*inputs), expected_mlp(*exact)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(0))
    result.backward(gradient.to(dtype))
    expected.backward(gradient.to(dtype).double())
    assert relative_error(result, expected) < ERRORS[dtype]
    for tensor, exact_tensor in zip(inputs, exact, strict=True):
        assert relative_error(tensor.grad, exact_tensor.grad) < ERRORS[dtype]


def test_gelu_is_exact():
    values = torch.linspace(-6, 6, 128)
    # A row for each value, that the identity multiplies.
    activation, before_gelu = operators.linear_gelu(
        torch.diag(values), torch.eye(128), torch.zeros(128), True
    )
    expected = functional.gelu(values.double())
    assert torch.equal(before_gelu.diagonal(), values)
    # The approximation by tanh differs by up to 5e-4.
    torch.testing.assert_close(
        activation.diagonal().double(), expected, rtol=1e-4, atol=2e-7
    )


def test_evaluation_has_the_same_bits():
    inputs = make_inputs(SHAPES["tails"], torch.float32)
    result = gelu_mlp(*inputs)
    with torch.no_grad():
        assert torch.equal(gelu_mlp(*inputs), result)


def test_operators_have_the_shapes_of_their_traces():
    input, first_weight, first_bias, second_weight, _ = (
        tensor.detach() for tensor in make_inputs((40, 16, 24), torch.float32)
    )
    checks = ("test_schema", "test_faketensor")
    for keeps_input in (False, True):
        arguments = (input, first_weight, first_bias, keeps_input)
        torch.library.opcheck(operators.linear_gelu, arguments, test_utils=checks)
    _, before_gelu = operators.linear_gelu(input, first_weight, first_bias, True)
    torch.library.opcheck(
        operators.gelu_linear_backward,
        (input, second_weight, before_gelu),
        test_utils=checks,
    )
