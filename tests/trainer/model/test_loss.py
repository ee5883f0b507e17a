"""The loss that writes the gradient of the logits over them."""

import functools

import pytest
import torch

from trainer.data.masking import IGNORED_LABEL
from trainer.model.loss import cross_entropy, cross_entropy_in_place


def not_compiled(function):
    return function


compile_for_fixed_shapes = functools.partial(torch.compile, dynamic=False)


@pytest.fixture
def labels_K():
    """Labels of 70 slots, every seventh of which is not used."""
    generator = torch.Generator().manual_seed(0)
    labels_K = torch.randint(0, 1000, (70,), generator=generator)
    labels_K[::7] = IGNORED_LABEL
    return labels_K


def _loss_and_gradient(loss_function, logits_KV, labels_K):
    """Return the loss, and the gradient of a third of it."""
    leaf_KV = logits_KV.clone().requires_grad_()
    # Times 1, so that the gradient overwrites this result and not the leaf.
    loss = loss_function(leaf_KV * 1, labels_K)
    (loss / 3).backward()
    return loss.detach(), leaf_KV.grad


@pytest.mark.parametrize(
    ("dtype", "compiled", "tolerance"),
    [
        # Logits of about 300 are multiples of 2**-44 in fp64 and of 2**-15 in fp32,
        # which is the relative error of their exponentials, and so of the gradients.
        pytest.param(torch.float64, not_compiled, 2**-44, id="fp64"),
        pytest.param(torch.float32, not_compiled, 2**-15, id="fp32"),
        # One rounding: the logits are in bf16, and the loss in fp32.
        pytest.param(
            torch.bfloat16, compile_for_fixed_shapes, 2**-8, id="bf16, compiled"
        ),
    ],
)
def test_matches_cross_entropy_of_torch(labels_K, dtype, compiled, tolerance):
    generator = torch.Generator().manual_seed(1)
    logits_KV = 9 * torch.randn(70, 1000, dtype=dtype, generator=generator)
    # Exponentials overflow unless the largest logit is subtracted.
    logits_KV[3] += 300
    torch.testing.assert_close(
        _loss_and_gradient(cross_entropy_in_place(compiled), logits_KV, labels_K),
        _loss_and_gradient(cross_entropy, logits_KV, labels_K),
        rtol=tolerance,
        # Gradients are below 0.005: this is a part of them, too.
        atol=tolerance / 1000,
    )


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        pytest.param(torch.float32, not_compiled, id="fp32"),
        pytest.param(torch.bfloat16, compile_for_fixed_shapes, id="bf16, compiled"),
    ],
)
def test_unused_slots_have_no_gradient(labels_K, dtype, compiled):
    generator = torch.Generator().manual_seed(2)
    logits_KV = torch.randn(70, 1000, dtype=dtype, generator=generator)
    loss_function = cross_entropy_in_place(compiled)
    _, gradient_KV = _loss_and_gradient(loss_function, logits_KV, labels_K)
    assert not gradient_KV[labels_K == IGNORED_LABEL].any()
    assert gradient_KV[labels_K != IGNORED_LABEL].any()


@pytest.fixture
def logits_KV():
    """Logits that are no leaf, so that their memory can be taken."""
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
