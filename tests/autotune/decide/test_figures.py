import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.plan import BASES, Figure
from autotune.decide.figures import computed, derived_basis, over, scaled, times
from autotune.decide.figures import given as said

positive = st.floats(1e-6, 1e12)


@st.composite
def figures(draw):
    low, value, high = sorted(draw(st.lists(positive, min_size=3, max_size=3)))
    bounded = draw(st.booleans())
    return Figure(
        value=value,
        low=low if bounded else None,
        high=high if bounded else None,
        confidence=0.95 if bounded else None,
        basis=draw(st.sampled_from(BASES)),
        source="s",
    )


@given(figures(), figures(), st.sampled_from([times, over]))
def test_bounds_hold_what_is_between(one, other, combine):
    found = combine(one, other, "both")
    if found.low is None:
        assert one.low is None
        assert other.low is None
    else:
        assert found.low <= found.value * (1 + 1e-9)
        assert found.value <= found.high * (1 + 1e-9)


@given(figures(), figures())
def test_a_quotient_times_its_divisor_is_the_dividend_and_no_better_known(one, other):
    back = times(over(one, other, ""), other, "")
    assert back.value == pytest.approx(one.value)
    if one.low is not None:
        assert back.low <= one.low * (1 + 1e-9)
        assert back.high >= one.high * (1 - 1e-9)


@given(st.lists(figures(), min_size=1, max_size=4), st.permutations(range(4)))
def test_the_basis_does_not_depend_on_the_order_and_is_as_weak_as_the_weakest(some, order):
    found = derived_basis(*some)
    assert found == derived_basis(*[some[place] for place in order if place < len(some)])
    bases = {figure.basis for figure in some}
    assert (found == "assumed") == ("assumed" in bases)
    assert (found == "given") == (bases == {"given"})
    assert found != "measured"


@given(figures(), positive)
def test_a_reading_in_another_unit_stays_a_reading_and_a_computed_one_does_not(figure, factor):
    assert scaled(figure, factor).basis == figure.basis
    assert computed(figure, factor, "x").basis == derived_basis(figure)
    assert scaled(figure, factor).value == pytest.approx(factor * figure.value)


def test_one_interval_keeps_its_confidence_and_two_together_have_none():
    measured = Figure(value=2.0, low=1.0, high=3.0, confidence=0.95, basis="measured", source="m")
    assert times(measured, said(5.0, "g"), "").confidence == 0.95
    assert times(measured, measured, "").confidence is None
