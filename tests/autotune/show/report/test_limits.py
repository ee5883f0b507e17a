from hypothesis import given
from hypothesis import strategies as st

from autotune.show.report.document import LeftOut
from autotune.show.report.limits import fair_share, first_of


def test_all_are_kept_where_they_fit_and_nothing_is_said():
    assert first_of([1, 2, 3], 3, "things") == ([1, 2, 3], ())


def test_more_are_cut_and_counted():
    kept, (left,) = first_of([1, 2, 3], 2, "things")
    assert kept == [1, 2]
    assert left == LeftOut(what="things", shown=2, of=3)


def test_what_matters_is_kept_before_others_in_the_order_of_all():
    kept, _ = first_of([1, 2, 3, 4, 5, 6], 3, "things", first=lambda one: one in (4, 6), which="even ones")
    assert kept == [1, 4, 6]


def test_those_that_have_little_leave_their_room_to_others():
    assert fair_share([2000, 0], 2400) >= 2000
    assert fair_share([2000, 2000], 2400) == 1200
    assert fair_share([100, 2000, 2000], 2400) == 1150


@given(st.lists(st.integers(0, 500), max_size=20), st.integers(20, 1000))
def test_a_share_fills_the_room_and_no_more(sizes, most):
    share = fair_share(sizes, most)
    shown = sum(min(size, share) for size in sizes)
    assert shown <= most
    assert shown == sum(sizes) or shown > most - max(1, len(sizes))
