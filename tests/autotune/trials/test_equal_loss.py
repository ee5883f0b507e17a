"""Two settings learn the same if their losses end within one per cent."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.trials.decide.equal_loss import (
    EQUAL_LOSS_SHARE,
    LEAST_FALL_SHARE,
    compare_losses,
    fell_too_little,
)

NAMES = ("fp32", "bf16")
"""Names of the reference and of the other setting."""
ANY_LOSSES = st.lists(st.floats(0.1, 20), min_size=1, max_size=60)
STEPS = 48
FALLING = [6.0 - 2.0 * step / (STEPS - 1) for step in range(STEPS)]
"""Losses that fall evenly from 6 to 4."""
LAST_QUARTER = FALLING[3 * STEPS // 4 :]
"""Losses that are compared."""
UNLIKE_START = [9.0] * (STEPS - len(LAST_QUARTER))
SHARES = st.floats(0, 0.2)


def scaled(losses, factor):
    return [factor * loss for loss in losses]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        pytest.param(scaled(FALLING, 0.989), False, id="1.1 % lower"),
        pytest.param(scaled(FALLING, 0.991), True, id="0.9 % lower"),
        pytest.param(scaled(FALLING, 1.009), True, id="0.9 % higher"),
        pytest.param(scaled(FALLING, 1.011), False, id="1.1 % higher"),
        pytest.param(UNLIKE_START + LAST_QUARTER, True, id="only last quarter alike"),
        pytest.param([math.nan] * STEPS, False, id="not a number"),
        pytest.param([math.inf] * STEPS, False, id="infinite"),
    ],
)
def test_losses_within_one_per_cent_are_equal(other, equal):
    assert EQUAL_LOSS_SHARE == 0.01
    verdict = compare_losses(FALLING, other, NAMES)
    assert verdict.equal is equal
    assert ("not within" in verdict.message) is not equal


@given(losses=ANY_LOSSES)
def test_loss_equals_itself(losses):
    verdict = compare_losses(losses, losses, NAMES)
    assert verdict.message.endswith(": 0.00% apart, within 1%")


@given(losses=ANY_LOSSES, near_share=SHARES, extra_share=SHARES)
def test_farther_loss_is_equal_only_if_nearer_is(losses, near_share, extra_share):
    # Farther even if the extra share is 0.
    far_share = near_share + extra_share + 1e-9
    near = compare_losses(losses, scaled(losses, 1 + near_share), NAMES)
    far = compare_losses(losses, scaled(losses, 1 + far_share), NAMES)
    assert near.equal or not far.equal


@given(losses=ANY_LOSSES)
def test_reference_that_did_not_learn_shows_nothing(losses):
    rising = sorted(losses)
    verdict = fell_too_little(rising, "fp32")
    assert not verdict.equal
    assert verdict.message.startswith("not checked: with ")


def test_reference_that_learnt_passes():
    first_loss = 6.0
    # A little below the largest final loss that counts as learnt.
    final_loss = 0.999 * first_loss * (1 - LEAST_FALL_SHARE)
    losses = [first_loss] + [final_loss] * (STEPS - 1)
    assert fell_too_little(losses, "fp32") is None
