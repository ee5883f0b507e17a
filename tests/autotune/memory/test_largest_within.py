"""Evaluation of a curve in few sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.memory.decide.largest_within import largest_within


def recorded(need_of, evaluated: list[int]):
    """Return a function that records the sizes of which it returns the need."""

    def need_of_recorded(size: int) -> float:
        evaluated.append(size)
        return need_of(size)

    return need_of_recorded


@given(
    fixed=st.floats(-1e9, 1e9),
    slope=st.floats(1e-3, 1e9),
    limit=st.floats(-1e12, 1e12),
    step=st.sampled_from([1, 7, 1000]),
    low=st.integers(0, 50),
    sizes_above_low=st.integers(0, 20_000),
)
def test_largest_within_evaluates_no_size_twice(
    fixed, slope, limit, step, low, sizes_above_low
):
    top = low + sizes_above_low
    evaluated: list[int] = []

    def need_of(size: int) -> float:
        return fixed + slope * (size // step)

    largest = largest_within(recorded(need_of, evaluated), limit, low=low, top=top)
    assert low <= largest <= top
    assert largest == low or need_of(largest) <= limit
    assert largest == top or need_of(largest + 1) > limit
    assert all(low < size <= top for size in evaluated)
    # Every fourth size halves the range, and halving 20,000 sizes takes 15 times.
    assert len(evaluated) == len(set(evaluated)) <= 4 * 15


def test_straight_line_takes_few_evaluations():
    evaluated: list[int] = []
    need_of = recorded(lambda size: 7 + 0.17 * size, evaluated)
    # (94 - 7) / 0.17 = 511.8
    assert largest_within(need_of, 94, low=3, top=16_384) == 511
    # Measured: 4 (32, 64, 511, 512); allows one more.
    assert len(evaluated) <= 5


@pytest.mark.parametrize(
    ("need_of", "limit", "largest"),
    [
        pytest.param(lambda size: 5, 5, 100, id="flat within the limit"),
        pytest.param(lambda size: 5, 4, 3, id="flat above the limit"),
        pytest.param(lambda size: -float(size), 5, 100, id="falling"),
    ],
)
def test_largest_within_of_curves_that_do_not_grow(need_of, limit, largest):
    evaluated: list[int] = []
    need_of_recorded = recorded(need_of, evaluated)
    assert largest_within(need_of_recorded, limit, low=3, top=100) == largest
    # Every fourth size halves the range, and halving 97 sizes takes 7 times.
    assert len(evaluated) <= 4 * 7
