from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.search import largest_within


@given(
    fixed=st.floats(-1e9, 1e9),
    slope=st.floats(1e-3, 1e9),
    limit=st.floats(-1e12, 1e12),
    step=st.sampled_from([1, 7, 1000]),
    low=st.integers(0, 50),
    more=st.integers(0, 20_000),
)
def test_the_answer_is_that_of_looking_at_every_size_and_no_size_is_asked_about_twice(
    fixed, slope, limit, step, low, more
):
    top = low + more
    asked: list[int] = []

    def needs(size: int) -> float:
        assert low < size <= top
        asked.append(size)
        return fixed + slope * (size // step)

    found = largest_within(needs, limit, low=low, top=top)
    assert low <= found <= top
    assert found == low or fixed + slope * (found // step) <= limit
    assert found == top or fixed + slope * ((found + 1) // step) > limit
    assert len(asked) == len(set(asked)) <= 60


def test_a_straight_law_takes_a_few_questions():
    asked: list[int] = []

    def needs(size: int) -> float:
        asked.append(size)
        return 7e9 + 1.7e8 * size

    assert largest_within(needs, 94e9, low=0, top=16_384) == 511
    assert len(asked) <= 5


def test_needs_that_do_not_grow_end_at_either_end():
    assert largest_within(lambda size: 5, 5, low=3, top=100) == 100
    assert largest_within(lambda size: 5, 4, low=3, top=100) == 3


def test_needs_that_fall_are_not_asked_about_at_every_size():
    asked: list[int] = []

    def needs(size: int) -> float:
        asked.append(size)
        return -float(size)

    assert largest_within(needs, 5, low=1, top=16_384) == 16_384
    assert len(asked) <= 70
