"""Slots of the MLM head for tokens to predict."""

import math

import pytest

from trainer.data.head_slots import head_slots, sufficient_slots

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


@pytest.mark.parametrize(
    ("needed", "fixed", "slots"),
    [
        pytest.param(0, 64, 64, id="none needed"),
        pytest.param(64, 64, 64, id="as many as fixed"),
        pytest.param(65, 64, 128, id="one more than fixed"),
        pytest.param(0, None, 1, id="changing shapes, none needed"),
        pytest.param(65, None, 65, id="changing shapes"),
    ],
)
def test_sufficient_slots_are_a_multiple_of_fixed_ones(needed, fixed, slots):
    assert sufficient_slots(needed, fixed) == slots
