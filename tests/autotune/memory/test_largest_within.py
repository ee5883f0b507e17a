"""Search for the largest size whose need is within a limit, by few evaluations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.decide.largest_within import (
    GAP_SHARE,
    largest_below_gaps,
    largest_within,
)


def recorded(need_of, evaluated: list[int]):
    """Return ``need_of`` as a function that appends each size to ``evaluated``."""

    def record_need(size: int) -> float:
        evaluated.append(size)
        return need_of(size)

    return record_need


@st.composite
def rising_steps(draw):
    """Draw a curve that rises by equal steps, each of which spans some sizes."""
    fixed = draw(st.floats(-1e9, 1e9))
    rise = draw(st.floats(1e-3, 1e9))
    sizes_per_step = draw(st.sampled_from([1, 7, 1000]))

    def need_of(size: int) -> float:
        return fixed + rise * (size // sizes_per_step)

    return need_of


SMALLEST_FLOAT = math.ulp(0.0)
LIMITS = st.floats(-1e12, 1e12)
LOW_SIZES = st.integers(0, 50)
MAX_RANGE = 20_000
RANGES = st.integers(0, MAX_RANGE)
"""Number of sizes above the low one."""


@given(need_of=rising_steps(), limit=LIMITS, low=LOW_SIZES, sizes_above_low=RANGES)
def test_finds_largest_size_within_limit(need_of, limit, low, sizes_above_low):
    top = low + sizes_above_low
    largest = largest_within(need_of, limit, low=low, top=top)
    assert low <= largest <= top
    assert largest == low or need_of(largest) <= limit
    assert largest == top or need_of(largest + 1) > limit


@given(need_of=rising_steps(), limit=LIMITS, low=LOW_SIZES, sizes_above_low=RANGES)
def test_evaluates_few_sizes_each_once(need_of, limit, low, sizes_above_low):
    evaluated: list[int] = []
    top = low + sizes_above_low
    largest_within(recorded(need_of, evaluated), limit, low=low, top=top)
    assert len(evaluated) == len(set(evaluated))
    assert all(low < size <= top for size in evaluated)
    # Every fourth size at least halves the range.
    assert len(evaluated) <= 4 * math.ceil(math.log2(MAX_RANGE))


def test_straight_line_takes_few_evaluations():
    evaluated: list[int] = []
    need_of = recorded(lambda size: 7 + 0.17 * size, evaluated)
    # (94 - 7) / 0.17 = 511.8
    assert largest_within(need_of, 94, low=3, top=16_384) == 511
    # Measured: 4 evaluations (32, 64, 511, 512); allows one more.
    assert len(evaluated) <= 5


@pytest.mark.parametrize(
    ("need_of", "limit", "largest"),
    [
        pytest.param(lambda size: 5, 5, 100, id="flat within the limit"),
        pytest.param(lambda size: 5, 4, 3, id="flat above the limit"),
        pytest.param(lambda size: -float(size), 5, 100, id="falling"),
        # The slope of a line is rounded to 0, or divides the limit to infinity.
        pytest.param(
            lambda size: SMALLEST_FLOAT if size > 40 else 0.0,
            5,
            100,
            id="growing once by the smallest float",
        ),
        pytest.param(
            lambda size: SMALLEST_FLOAT * size,
            5,
            100,
            id="growing by the smallest float",
        ),
    ],
)
def test_curve_that_hardly_grows_ends(need_of, limit, largest):
    evaluated: list[int] = []
    recorded_need = recorded(need_of, evaluated)
    assert largest_within(recorded_need, limit, low=3, top=100) == largest
    # Every fourth size at least halves the range of 97 sizes.
    assert len(evaluated) <= 4 * math.ceil(math.log2(97))


def need_with_gap(size: int) -> float:
    """Return a need that falls by 30 above 1000."""
    return float(size - 30 if size > 1000 else size)


@pytest.mark.parametrize(
    ("limit", "top", "largest"),
    [
        pytest.param(984, 16_384, 984, id="larger sizes fit again"),
        pytest.param(1000, 16_384, 1030, id="all smaller sizes fit"),
        pytest.param(984, 1005, 984, id="top beyond the gap"),
        pytest.param(-1, 16_384, 0, id="no size fits"),
    ],
)
def test_answer_is_below_a_gap(limit, top, largest):
    assert largest_below_gaps(need_with_gap, limit, top=top) == largest


def test_answer_is_below_several_gaps():
    def need_of(size: int) -> float:
        return 101 if size in range(930, 950) or size in range(970, 990) else 0.1 * size

    assert largest_below_gaps(need_of, 100, top=1000) == 929


@given(need_of=rising_steps(), limit=LIMITS, top=RANGES)
def test_curve_without_gap_keeps_its_answer(need_of, limit, top):
    largest = largest_within(need_of, limit, low=0, top=top)
    assert largest_below_gaps(need_of, limit, top=top) == largest


def test_gaps_are_sought_at_few_sizes_nearby():
    evaluated: list[int] = []
    need_of = recorded(float, evaluated)
    largest_within(need_of, 1000, low=0, top=16_384)
    search = list(evaluated)
    evaluated.clear()
    assert largest_below_gaps(need_of, 1000, top=16_384) == 1000
    assert evaluated == [*search, 999, 998, 996, 992, 984, 968]
    # The next one, 936, is farther away.
    assert 968 >= (1 - GAP_SHARE) * 1000 > 936
