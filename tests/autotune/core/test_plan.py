import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.plan import BASES, PlanFigure, derived, derived_basis

positive = st.floats(1e-6, 1e12)
bases = st.sampled_from(BASES)


def figure(value, basis="measured", share=0.0):
    low, high = (value * (1 - share), value * (1 + share)) if share else (None, None)
    return PlanFigure(
        value=value, low=low, high=high, confidence=0.95 if share else None, basis=basis, source="s"
    )  # fmt: skip


@given(positive, positive, st.floats(0.01, 0.9))
def test_a_measured_interval_is_carried_along_by_its_ends(one, other, share):
    measured, exact = figure(one, share=share), figure(other, "assumed")
    product = derived(lambda a, b: a * b, measured, exact, source="both")
    quotient = derived(lambda a, b: a / b, exact, measured, source="both")
    assert [product.low, product.high] == pytest.approx([measured.low * other, measured.high * other])
    assert [quotient.low, quotient.high] == pytest.approx([other / measured.high, other / measured.low])
    assert product.confidence == quotient.confidence == 0.95
    assert product.basis == quotient.basis == "assumed"


def test_two_intervals_have_no_confidence_together_and_nothing_is_invented_for_one_that_has_none():
    both = derived(lambda a, b: a * b, figure(2.0, share=0.1), figure(3.0, share=0.1), source="")
    neither = derived(lambda a: 2 * a, figure(2.0), source="")
    assert both.low is both.confidence is neither.low is None
    assert (both.value, neither.value) == (6.0, 4.0)


@given(st.lists(bases, min_size=1, max_size=4), st.permutations(range(4)))
def test_the_basis_does_not_depend_on_the_order_and_is_as_weak_as_the_weakest(some, order):
    figures = [figure(1.0, basis) for basis in some]
    found = derived_basis(*figures)
    assert found == derived_basis(*[figures[place] for place in order if place < len(figures)])
    assert (found == "assumed") == ("assumed" in some)
    assert (found == "given") == (set(some) == {"given"})
    assert found != "measured"
