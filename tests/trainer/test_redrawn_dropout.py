"""Dropout of compiled layers, which keeps a seed for its backward pass and no mask."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from trainer.compilation import RedrawnDropout

DROPPED_SHARE = 0.25
INPUTS = 500
WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutPass:
    """Forward and backward pass of a compiled layer with dropout."""

    result: torch.Tensor
    gradient: torch.Tensor
    """Gradient of the sum of the result with respect to the input."""
    keeps_mask: bool
    """True if a tensor of booleans is kept for the backward pass."""


def _drop_out(dropout: type[nn.Dropout]) -> DropoutPass:
    """Run a compiled linear layer with dropout, always with the same seed."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), dropout(DROPPED_SHARE))
    input = torch.ones(INPUTS, WIDTH, requires_grad=True)
    saved_dtypes = []

    def note_dtype(tensor):
        saved_dtypes.append(tensor.dtype)
        return tensor

    compiled = torch.compile(lambda x: layer(x), fullgraph=True)  # noqa: PLW0108 - torch leaves out a Sequential
    with torch.autograd.graph.saved_tensors_hooks(note_dtype, lambda tensor: tensor):
        result = compiled(input)
    result.sum().backward()
    # In evaluation, nothing is dropped.
    assert torch.equal(layer.eval()(input), layer[0](input))
    return DropoutPass(
        result=result.detach(),
        gradient=input.grad,
        keeps_mask=torch.bool in saved_dtypes,
    )


@pytest.mark.slow
def test_redrawn_dropout_keeps_seed_instead_of_mask():
    plain = _drop_out(nn.Dropout)
    redrawn = _drop_out(RedrawnDropout)
    assert plain.keeps_mask
    assert not redrawn.keeps_mask
    dropped_share = float((redrawn.result == 0).float().mean())
    variance = DROPPED_SHARE * (1 - DROPPED_SHARE) / (INPUTS * WIDTH)
    tolerance = 4 * math.sqrt(variance)
    assert dropped_share == pytest.approx(DROPPED_SHARE, abs=tolerance)
    torch.testing.assert_close(
        (redrawn.result, redrawn.gradient), (plain.result, plain.gradient)
    )
