import copy

import pytest
import torch

from tests.trainer import oracles
from trainer.model.layer_norms import keep_norms_in_bf16


@pytest.mark.parametrize("family", ["bert", "modernbert", "esm", "eurobert"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_residual_stream_has_its_dtype(family, dtype, dataset):
    config = oracles.config_of(family, precision="bf16", residual_dtype=dtype)
    input_dtypes = []
    training = oracles.training_of(config, dataset)
    for layer in training.module.layers:
        layer.register_forward_pre_hook(
            lambda _, args: input_dtypes.append(args[0].dtype)
        )
    with torch.no_grad():
        training.module(oracles.micro_batches(dataset, config)[0])
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert input_dtypes == [expected] * len(training.module.layers)


@pytest.mark.parametrize(
    ("bias", "affine"),
    [
        pytest.param(True, True, id="weight and bias"),
        pytest.param(False, True, id="weight"),
        pytest.param(False, False, id="neither"),
    ],
)
def test_norm_that_keeps_bf16_rounds_only_gradients(bias, affine):
    torch.manual_seed(0)
    exact = torch.nn.LayerNorm(96, elementwise_affine=affine, bias=bias)
    for parameter in exact.parameters():
        parameter.data.normal_(1.0, 0.3)
    kept = copy.deepcopy(exact)
    keep_norms_in_bf16([torch.nn.Sequential(kept)], torch.float32)
    inputs = torch.randn(2, 64, 96) * 3 + 1

    def result_and_gradients(norm):
        """Return the result, and the gradients of input, weight and bias."""
        leaf = inputs.clone().requires_grad_()
        result = norm(leaf)
        gradients = torch.autograd.grad(
            result.square().sin().sum(), [leaf, *norm.parameters()]
        )
        return result, gradients

    exact_result, exact_gradients = result_and_gradients(exact)
    kept_result, kept_gradients = result_and_gradients(kept)
    torch.testing.assert_close(exact_result, kept_result, rtol=1e-5, atol=1e-5)
    for gradient, rounded in zip(exact_gradients, kept_gradients, strict=True):
        assert (gradient - rounded).norm() < 0.004 * gradient.norm()
    if affine:
        _, exact_weight_gradient, *_ = exact_gradients
        _, rounded_weight_gradient, *_ = kept_gradients
        assert not torch.equal(exact_weight_gradient, rounded_weight_gradient)
    with torch.no_grad():
        assert torch.equal(kept(inputs), exact(inputs))
