from autotune.show.report.document import LeftOut
from autotune.show.report.limits import first_of


def test_all_are_kept_where_they_fit_and_nothing_is_said():
    assert first_of([1, 2, 3], 3, "things") == ([1, 2, 3], ())


def test_more_are_cut_and_counted():
    kept, (left,) = first_of([1, 2, 3], 2, "things")
    assert kept == [1, 2]
    assert left == LeftOut(what="things", shown=2, of=3)


def test_what_matters_is_kept_before_others_in_the_order_of_all():
    kept, _ = first_of([1, 2, 3, 4, 5, 6], 3, "things", first=lambda one: one in (4, 6), which="even ones")
    assert kept == [1, 4, 6]
