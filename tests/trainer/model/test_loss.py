"""The loss that writes the gradient of the logits over them."""

import functools

import pytest
import torch

from trainer.data.masking import IGNORED_LABEL
from trainer.model.loss import cross_entropy, cross_entropy_in_place


def not_compiled(function):
    return function


@pytest.mark.parametrize(
    ("dtype", "tolerance", "compiled"),
    [
        (torch.float64, 1e-12, not_compiled),
        (torch.float32, 1e-6, not_compiled),
        (torch.bfloat16, 4e-3, functools.partial(torch.compile, dynamic=False)),
    ],
)
def test_matches_cross_entropy_of_torch(dtype, tolerance, compiled):
    torch.manual_seed(0)
    logits_KV = 9 * torch.randn(70, 1000, dtype=dtype)
    labels_K = torch.randint(0, 1000, (70,))
    labels_K[::7] = IGNORED_LABEL
    logits_KV[3] += 300  # exponentials overflow unless the largest is subtracted

    def loss_and_gradient(loss_function):
        leaf_KV = logits_KV.clone().requires_grad_()
        loss = loss_function(leaf_KV * 1, labels_K)
        (loss / 3).backward()
        return loss.detach(), leaf_KV.grad

    expected = loss_and_gradient(cross_entropy)
    loss, gradient_KV = loss_and_gradient(cross_entropy_in_place(compiled))
    torch.testing.assert_close(
        (loss, gradient_KV), expected, rtol=tolerance, atol=tolerance
    )
    assert gradient_KV[::7].abs().max() == 0


@pytest.fixture
def logits_KV():
    return torch.randn(5, 9, requires_grad=True) * 1


def test_gradient_takes_memory_of_logits(logits_KV):
    loss = cross_entropy_in_place(not_compiled)(logits_KV, torch.arange(5))
    (gradient_KV,) = torch.autograd.grad(loss, logits_KV)
    assert gradient_KV.data_ptr() == logits_KV.data_ptr()


def test_gradient_cannot_be_computed_twice(logits_KV):
    loss = cross_entropy_in_place(not_compiled)(logits_KV, torch.arange(5))
    torch.autograd.grad(loss, logits_KV, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
