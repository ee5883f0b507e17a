import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.equal_loss import EQUAL_LOSS_SHARE, LEAST_FALL_SHARE, compare_losses, fell_too_little

NAMES = ("fp32", "bf16")
LOSSES = st.lists(st.floats(0.1, 20), min_size=1, max_size=60)


def falling(last, steps=48, first=6.0):
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]


def test_the_same_losses_are_equal():
    verdict = compare_losses(falling(4.0), falling(4.0), NAMES)
    assert verdict.equal
    assert verdict.told == ("after 48 steps the loss was 4.2340 with bf16 and 4.2340 with fp32: 0.00% apart, within 1%")


@pytest.mark.parametrize(("factor", "equal"), [(1.009, True), (1.011, False), (0.991, True), (0.989, False)])
def test_a_loss_within_one_per_cent_is_equal_whichever_is_lower(factor, equal):
    assert EQUAL_LOSS_SHARE == 0.01
    reference = falling(4.0)
    verdict = compare_losses(reference, [factor * one for one in reference], NAMES)
    assert verdict.equal is equal
    assert ("not within" in verdict.told) is not equal


def test_only_the_last_quarter_counts():
    other = [*([9.0] * 36), *falling(4.0)[36:]]
    assert compare_losses(falling(4.0), other, NAMES).equal


def test_a_loss_that_is_no_number_is_not_equal():
    assert not compare_losses(falling(4.0), [float("nan")] * 48, NAMES).equal
    assert not compare_losses(falling(4.0), [float("inf")] * 48, NAMES).equal


@given(LOSSES)
def test_whatever_is_held_against_itself_is_equal(losses):
    assert compare_losses(losses, losses, NAMES).equal


@given(LOSSES, st.floats(0, 0.2), st.floats(0, 0.2))
def test_what_is_further_apart_is_equal_at_most_where_the_nearer_one_is(losses, apart, more):
    near = compare_losses(losses, [one * (1 + apart) for one in losses], NAMES)
    far = compare_losses(losses, [one * (1 + apart + more + 1e-9) for one in losses], NAMES)
    assert near.equal or not far.equal


def test_a_reference_that_did_not_learn_shows_nothing():
    verdict = fell_too_little([6.0] * 48, "fp32")
    assert verdict is not None
    assert not verdict.equal
    assert verdict.told.startswith("not checked: in 48 steps the loss went from 6.0000 to 6.0000 with fp32")
    assert fell_too_little([6.0, *[6.0 * (1 - LEAST_FALL_SHARE) * 0.999] * 47], "fp32") is None


@given(LOSSES)
def test_a_loss_that_rose_or_stayed_always_counts_as_too_little(losses):
    assert fell_too_little(sorted(losses), "fp32") is not None
