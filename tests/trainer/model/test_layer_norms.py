"""Layer norms that keep bf16 for backward, and the dtype of the residual stream."""

import copy

import pytest
import torch
from torch import nn

from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.model.layer_norms import keep_norms_in_bf16

BF16_ROUNDING = 2**-8
"""Largest relative error of one rounding to bf16, which has 8 significant bits."""


@pytest.mark.parametrize("family", ["bert", "modernbert", "esm", "eurobert"])
@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        pytest.param("fp32", torch.float32, id="fp32"),
        pytest.param("bf16", torch.bfloat16, id="bf16"),
    ],
)
def test_residual_stream_has_its_dtype(family, setting, dtype, dataset):
    config = config_of(family, precision="bf16", residual_dtype=setting)
    input_dtypes = []
    training = training_of(config, dataset)
    for layer in training.module.layers:
        layer.register_forward_pre_hook(
            lambda _, args: input_dtypes.append(args[0].dtype)
        )
    with torch.no_grad():
        training.module(micro_batches(dataset, config)[0])
    assert input_dtypes == [dtype] * len(training.module.layers)


def torch_norm(*, affine: bool, bias: bool) -> nn.LayerNorm:
    """Return torch's own layer norm, which keeps its input in fp32 for backward."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(96, elementwise_affine=affine, bias=bias)
    for parameter in norm.parameters():
        parameter.data.normal_(1.0, 0.3)
    return norm


def bf16_norm(norm: nn.LayerNorm) -> nn.LayerNorm:
    """Return a layer norm with the same weights that keeps bf16 for backward."""
    norm_in_bf16 = copy.deepcopy(norm)
    keep_norms_in_bf16([nn.Sequential(norm_in_bf16)], torch.float32)
    return norm_in_bf16


@pytest.fixture
def inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 64, 96, generator=generator) * 3 + 1


def gradients_of(norm: nn.LayerNorm, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of an arbitrary loss, by input and then by parameters."""
    leaf = inputs.clone().requires_grad_()
    loss = norm(leaf).square().sin().sum()
    return torch.autograd.grad(loss, [leaf, *norm.parameters()])


@pytest.mark.parametrize(
    ("affine", "bias"),
    [
        pytest.param(True, True, id="weight and bias"),
        pytest.param(True, False, id="weight"),
        pytest.param(False, False, id="neither"),
    ],
)
class TestNormThatKeepsBf16:
    def test_has_result_of_torch_in_training(self, affine, bias, inputs):
        norm = torch_norm(affine=affine, bias=bias)
        norm_in_bf16 = bf16_norm(norm)
        # Sums in fp32 are in another order.
        torch.testing.assert_close(
            norm_in_bf16(inputs), norm(inputs), rtol=1e-5, atol=1e-5
        )

    @torch.no_grad()
    def test_has_the_same_bits_in_evaluation(self, affine, bias, inputs):
        norm = torch_norm(affine=affine, bias=bias)
        norm_in_bf16 = bf16_norm(norm)
        assert torch.equal(norm_in_bf16(inputs), norm(inputs))

    def test_has_gradients_within_one_rounding(self, affine, bias, inputs):
        norm = torch_norm(affine=affine, bias=bias)
        norm_in_bf16 = bf16_norm(norm)
        for gradient, rounded in zip(
            gradients_of(norm, inputs), gradients_of(norm_in_bf16, inputs), strict=True
        ):
            assert (gradient - rounded).norm() < BF16_ROUNDING * gradient.norm()


@pytest.mark.parametrize("bias", [True, False])
def test_gradient_of_weight_is_rounded(bias, inputs):
    norm = torch_norm(affine=True, bias=bias)
    norm_in_bf16 = bf16_norm(norm)
    _, exact_gradient, *_ = gradients_of(norm, inputs)
    _, rounded_gradient, *_ = gradients_of(norm_in_bf16, inputs)
    assert not torch.equal(exact_gradient, rounded_gradient)
