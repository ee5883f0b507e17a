import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.plan.values import BASES, PlanFigure, derived, derived_basis

positive = st.floats(1e-6, 1e12)
bases = st.sampled_from(BASES)


def figure(value, basis="measured", share=0.0):
    low, high = (value * (1 - share), value * (1 + share)) if share else (None, None)
    return PlanFigure(
        value=value,
        low=low,
        high=high,
        confidence=0.95 if share else None,
        basis=basis,
        source="s",
    )


@given(positive, positive, st.floats(0.01, 0.9))
def test_a_measured_interval_is_carried_along_by_its_ends_and_two_have_no_confidence_together(
    one, other, share
):
    known, exact = figure(one, share=share), figure(other, "assumed")
    product = derived(lambda a, b: a * b, known, exact, source="both")
    quotient = derived(lambda a, b: a / b, exact, known, source="both")
    assert [product.low, product.high] == pytest.approx(
        [known.low * other, known.high * other]
    )
    assert [quotient.low, quotient.high] == pytest.approx(
        [other / known.high, other / known.low]
    )
    assert product.confidence == quotient.confidence == 0.95
    assert product.basis == quotient.basis == "assumed"
    both = derived(lambda a, b: a * b, known, known, source="")
    assert (both.value, both.low, both.confidence) == (one * one, None, None)
    assert derived(lambda a: 2 * a, exact, source="").low is None


@given(st.lists(bases, min_size=1, max_size=4), st.permutations(range(4)))
def test_the_basis_does_not_depend_on_the_order_and_is_as_weak_as_the_weakest(
    some, order
):
    figures = [figure(1.0, basis) for basis in some]
    found = derived_basis(*figures)
    assert found == derived_basis(
        *[figures[place] for place in order if place < len(figures)]
    )
    assert (found == "assumed") == ("assumed" in some)
    assert (found == "given") == (set(some) == {"given"})
    assert found != "measured"
