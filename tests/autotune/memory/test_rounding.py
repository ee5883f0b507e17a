"""Divisions of integers that round up."""

from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.decide.rounding import ceil_divide, round_up

NUMBERS = st.integers(0, 2**70)
"""Beyond the integers that a float can hold."""
DIVISORS = st.integers(1, 2**40)


@given(number=NUMBERS, divisor=DIVISORS)
def test_quotient_is_the_smallest_that_suffices(number, divisor):
    quotient = ceil_divide(number, divisor)
    assert quotient * divisor >= number
    assert (quotient - 1) * divisor < number


@given(number=NUMBERS, multiple_of=DIVISORS)
def test_rounds_up_to_a_multiple(number, multiple_of):
    rounded = round_up(number, multiple_of)
    assert rounded % multiple_of == 0
    assert 0 <= rounded - number < multiple_of
