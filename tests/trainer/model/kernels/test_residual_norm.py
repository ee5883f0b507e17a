"""The layer norm of a residual sum and its gradients, compared with fp64."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.model.kernels import residual_norm as operators
from trainer.model.kernels.residual_norm import residual_norm

pytestmark = pytest.mark.interpreted

BF16_STEP = 2**-7
"""Largest relative error of a number that is truncated to bf16."""
FP32_ERROR = 1e-5
"""Error of sums of a few hundred numbers of about 1 in fp32."""
EPS = 1e-5
ROWS = 37
"""Rows of a test: neither a multiple of a tile's rows nor of a program's."""


@dataclass(frozen=True)
class Inputs:
    """Tensors that the norm gets, as leaves."""

    projection: torch.Tensor
    projection_bias: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(cls, width, residual_dtype, rows=ROWS):
        generator = torch.Generator().manual_seed(width)

        def draw(*shape, dtype=torch.float32, mean=0.0):
            values = torch.randn(*shape, generator=generator) + mean
            return values.to(dtype).requires_grad_()

        return cls(
            projection=draw(rows, width, dtype=torch.bfloat16),
            projection_bias=draw(width, dtype=torch.bfloat16),
            residual=draw(rows, width, dtype=residual_dtype, mean=0.5),
            weight=draw(width, mean=1.0),
            bias=draw(width),
        )

    def as_tuple(self):
        return (
            self.projection,
            self.projection_bias,
            self.residual,
            self.weight,
            self.bias,
        )

    def in_fp64(self):
        return Inputs(
            *(tensor.detach().double().requires_grad_() for tensor in self.as_tuple())
        )

    def gradients(self):
        return [tensor.grad for tensor in self.as_tuple()]


def norm_of(inputs, **options):
    return residual_norm(*inputs.as_tuple(), eps=EPS, **options)


def expected_norm(inputs, kept_factor=1.0):
    """Return the norm by torch's own functions.

    ``kept_factor`` is 0 where dropout zeroes an element.
    """
    projection = (inputs.projection + inputs.projection_bias) * kept_factor
    return functional.layer_norm(
        projection + inputs.residual,
        inputs.weight.shape,
        inputs.weight,
        inputs.bias,
        EPS,
    )


def relative_error(actual, expected):
    difference = actual.detach().double() - expected.detach()
    return float(difference.norm() / expected.detach().norm())


def kept_by_dropout(inputs):
    """Return which elements kept their gradient, as drawn by the backward kernel."""
    return inputs.projection.grad != 0


def backward_of_both(result, matmul_input):
    """Compute gradients of a loss that uses both results, and return theirs."""
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(result.shape, generator=generator).to(used.dtype)
        for used in (result, matmul_input)
    ]
    torch.autograd.backward([result, matmul_input], gradients)
    return gradients


residual_dtypes = pytest.mark.parametrize(
    "residual_dtype",
    [
        pytest.param(torch.float32, id="fp32 residual"),
        pytest.param(torch.bfloat16, id="bf16 residual"),
    ],
)


@residual_dtypes
@pytest.mark.parametrize("width", [768, 1024, 384, 100])
class TestAgainstFp64:
    def test_norm(self, width, residual_dtype):
        inputs = Inputs.of(width, residual_dtype)
        result, matmul_input = norm_of(inputs, feeds_matmul=True)
        expected = expected_norm(inputs.in_fp64())
        assert (result.dtype, matmul_input.dtype) == (residual_dtype, torch.bfloat16)
        is_fp32 = residual_dtype == torch.float32
        assert relative_error(result, expected) < (FP32_ERROR if is_fp32 else BF16_STEP)
        assert relative_error(matmul_input, expected) < BF16_STEP

    def test_gradients(self, width, residual_dtype):
        inputs = Inputs.of(width, residual_dtype)
        exact = inputs.in_fp64()
        gradients = backward_of_both(*norm_of(inputs, feeds_matmul=True))
        expected_norm(exact).backward(sum(part.double() for part in gradients))
        for actual, expected in zip(inputs.gradients(), exact.gradients(), strict=True):
            # The normalised input is kept in bf16 for backward.
            assert relative_error(actual, expected) < BF16_STEP
        # Sums of gradients alone are not rounded.
        assert relative_error(inputs.bias.grad, exact.bias.grad) < FP32_ERROR

    def test_dropout(self, width, residual_dtype):
        dropout = 0.3
        inputs = Inputs.of(width, residual_dtype)
        exact = inputs.in_fp64()
        result, matmul_input = norm_of(inputs, feeds_matmul=True, dropout=dropout)
        gradients = backward_of_both(result, matmul_input)
        # Forward agrees with the mask that backward has drawn.
        kept_factor = kept_by_dropout(inputs) / (1 - dropout)
        expected = expected_norm(exact, kept_factor)
        is_fp32 = residual_dtype == torch.float32
        assert relative_error(result, expected) < (FP32_ERROR if is_fp32 else BF16_STEP)
        expected.backward(sum(part.double() for part in gradients))
        for actual, expected_gradient in zip(
            inputs.gradients(), exact.gradients(), strict=True
        ):
            assert relative_error(actual, expected_gradient) < BF16_STEP


def masks(*, width=256, rows=ROWS, draws=1, dropout=0.3):
    """Return the masks of several calls, shape (draws, rows, width)."""
    drawn = []
    for _ in range(draws):
        inputs = Inputs.of(width, torch.float32, rows)
        result, _ = norm_of(inputs, dropout=dropout)
        result.sin().sum().backward()
        drawn.append(kept_by_dropout(inputs))
    return torch.stack(drawn)


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share(dropout):
    kept = masks(draws=4, dropout=dropout)
    deviation = (dropout * (1 - dropout) / kept.numel()) ** 0.5
    assert float(kept.float().mean()) == pytest.approx(1 - dropout, abs=5 * deviation)


def test_masks_of_rows_columns_and_calls_differ():
    kept = masks(draws=2)
    for pattern in (kept.flatten(0, 1), kept.transpose(1, 2).flatten(0, 1)):
        assert len(pattern.unique(dim=0)) == len(pattern)


def test_generator_determines_masks():
    torch.manual_seed(3)
    first = masks(draws=2)
    torch.manual_seed(3)
    assert torch.equal(masks(draws=2), first)


def test_checkpointing_draws_the_same_mask():
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(3)
        inputs = Inputs.of(100, torch.float32)

        def norm(inputs=inputs):
            return norm_of(inputs, dropout=0.3)[0]

        result = checkpoint(norm, use_reentrant=False) if recomputes else norm()
        result.sin().sum().backward()
        gradients.append(inputs.gradients())
    assert all(map(torch.equal, *gradients))


def test_programs_compute_several_tiles():
    # Backward runs as many programs as an H100's SMs take, of four rows each.
    rows = 4 * 264 + 5
    inputs = Inputs.of(100, torch.float32, rows)
    exact = inputs.in_fp64()
    norm_of(inputs)[0].sin().sum().backward()
    expected_norm(exact).sin().sum().backward()
    for actual, expected in zip(inputs.gradients(), exact.gradients(), strict=True):
        assert relative_error(actual, expected) < BF16_STEP


@residual_dtypes
def test_evaluation_has_the_same_bits(residual_dtype):
    inputs = Inputs.of(100, residual_dtype)
    result, matmul_input = norm_of(inputs, feeds_matmul=True)
    with torch.no_grad():
        evaluated = norm_of(inputs, feeds_matmul=True)
    assert torch.equal(evaluated[0], result)
    assert torch.equal(evaluated[1], matmul_input)


def test_gradient_may_be_expanded():
    inputs = Inputs.of(100, torch.float32)
    exact = inputs.in_fp64()
    norm_of(inputs)[0].sum().backward()
    expected_norm(exact).sum().backward()
    # The gradient of a normalised sum is 0 but for the weight's share.
    assert relative_error(inputs.residual.grad, exact.residual.grad) < BF16_STEP


def test_operators_have_the_shapes_of_their_traces():
    inputs = Inputs.of(100, torch.float32)
    tensors = [tensor.detach() for tensor in inputs.as_tuple()]
    seed = torch.tensor([3])
    checks = ("test_schema", "test_faketensor")
    for narrow, keeps in itertools.product((False, True), repeat=2):
        arguments = (*tensors, seed, 0.3, EPS, narrow, keeps)
        torch.library.opcheck(
            operators.residual_norm_forward, arguments, test_utils=checks
        )
    result, narrow_result, normal, scale = operators.residual_norm_forward(
        *tensors, seed, 0.3, EPS, True, True
    )
    for narrow_gradient, dropout in ((narrow_result, 0.3), (None, 0.0)):
        torch.library.opcheck(
            operators.residual_norm_backward,
            (
                result,
                narrow_gradient,
                normal,
                scale,
                tensors[3],
                seed,
                dropout,
                torch.bfloat16,
            ),
            test_utils=checks,
        )
