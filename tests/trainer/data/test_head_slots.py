"""Slots of the MLM head for tokens to predict."""

import math

import pytest

from trainer.data.head_slots import head_slots

TILE = 64
"""Positions in a tile of Tensor Cores."""


@pytest.mark.parametrize(
    ("positions", "probability"),
    [
        pytest.param(64, 0.15, id="one sequence"),
        pytest.param(4096, 0.15, id="small micro-batch"),
        pytest.param(94_208, 0.3, id="large micro-batch"),
        pytest.param(64, 0.99, id="nearly all positions"),
    ],
)
def test_slots_are_six_sigmas_above_the_mean(positions, probability):
    slots = head_slots(positions, probability)
    mean = positions * probability
    sigma = math.sqrt(mean * (1 - probability))
    likely_max = mean + 6 * sigma
    assert slots % TILE == 0
    assert slots >= min(positions, likely_max)
    # Rounding up adds less than a tile.
    assert slots <= max(TILE, min(positions, likely_max + TILE))
