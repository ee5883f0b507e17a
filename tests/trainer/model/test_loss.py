"""The loss that writes the gradient of the logits over them, against torch's
cross-entropy."""

import functools

import pytest
import torch

from trainer.data.masking import IGNORED_LABEL
from trainer.model.loss import cross_entropy, cross_entropy_in_place


def run_as_is(function):
    return function


@pytest.mark.parametrize(
    ("dtype", "near", "compiled"),
    [
        (torch.float64, 1e-12, run_as_is),
        (torch.float32, 1e-6, run_as_is),
        (torch.bfloat16, 4e-3, functools.partial(torch.compile, dynamic=False)),
    ],
)
def test_loss_and_gradient_are_those_of_cross_entropy(dtype, near, compiled):
    torch.manual_seed(0)
    logits_KV, labels_K = (
        9 * torch.randn(70, 1000, dtype=dtype),
        torch.randint(0, 1000, (70,)),
    )
    labels_K[::7] = IGNORED_LABEL
    logits_KV[3] += 300  # exponentials overflow unless the largest is subtracted
    found = []
    for loss_of in (cross_entropy, cross_entropy_in_place(compiled)):
        leaf_KV = logits_KV.clone().requires_grad_()
        loss = loss_of(leaf_KV * 1, labels_K)
        (loss / 3).backward()
        found.append((loss.detach(), leaf_KV.grad))
    torch.testing.assert_close(found[1], found[0], rtol=near, atol=near)
    assert found[1][1][::7].abs().max() == 0


def test_the_gradient_takes_the_memory_of_the_logits_and_cannot_be_computed_twice():
    leaf_KV = torch.randn(5, 9, requires_grad=True)
    logits_KV = leaf_KV * 1
    loss = cross_entropy_in_place(run_as_is)(logits_KV, torch.arange(5))
    (gradient_KV,) = torch.autograd.grad(loss, logits_KV, retain_graph=True)
    assert gradient_KV.data_ptr() == logits_KV.data_ptr()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
