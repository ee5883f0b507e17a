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
LOSSES = st.lists(st.floats(0.1, 20), min_size=1, max_size=60)
FALLING = [6.0 - 2.0 * step / 47 for step in range(48)]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        *[
            ([factor * one for one in FALLING], factor in (0.991, 1.009))
            for factor in (0.989, 0.991, 1.009, 1.011)
        ],
        ([*([9.0] * 36), *FALLING[36:]], True),  # only the last quarter counts
        ([float("nan")] * 48, False),
        ([float("inf")] * 48, False),
    ],
)
def test_losses_within_one_per_cent_at_the_end_are_equal_whichever_is_lower(
    other, equal
):
    assert EQUAL_LOSS_SHARE == 0.01
    verdict = compare_losses(FALLING, other, NAMES)
    assert verdict.equal is equal
    assert ("not within" in verdict.message) is not equal


@given(LOSSES, st.floats(0, 0.2), st.floats(0, 0.2))
def test_a_loss_equals_itself_and_what_is_further_apart_only_if_the_nearer_one_does(
    losses, apart, more
):
    assert compare_losses(losses, losses, NAMES).message.endswith(
        ": 0.00% apart, within 1%"
    )
    near = compare_losses(losses, [one * (1 + apart) for one in losses], NAMES)
    far = compare_losses(
        losses, [one * (1 + apart + more + 1e-9) for one in losses], NAMES
    )
    assert near.equal or not far.equal


@given(LOSSES)
def test_a_reference_that_did_not_learn_shows_nothing(losses):
    verdict = fell_too_little(sorted(losses), "fp32")
    assert not verdict.equal
    assert verdict.message.startswith("not checked: with ")
    assert (
        fell_too_little([6.0, *[6.0 * (1 - LEAST_FALL_SHARE) * 0.999] * 47], "fp32")
        is None
    )
