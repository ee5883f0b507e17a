import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.evidence.plan import BASES, PlanFigure, derived, derived_basis

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
def test_derived_figure_carries_its_interval(value, exact_value, share):
    known = figure(value, share=share)
    exact = figure(exact_value, "assumed")
    product = derived(lambda a, b: a * b, known, exact, source="both")
    quotient = derived(lambda a, b: a / b, exact, known, source="both")
    assert [product.low, product.high] == pytest.approx(
        [known.low * exact_value, known.high * exact_value]
    )
    assert [quotient.low, quotient.high] == pytest.approx(
        [exact_value / known.high, exact_value / known.low]
    )
    assert product.confidence == quotient.confidence == 0.95
    assert product.basis == quotient.basis == "assumed"


@given(positive, st.floats(0.01, 0.9))
def test_two_intervals_have_no_common_confidence(value, share):
    known = figure(value, share=share)
    both = derived(lambda a, b: a * b, known, known, source="")
    assert (both.value, both.low, both.confidence) == (value * value, None, None)


@given(positive)
def test_exact_figure_has_no_interval(value):
    exact = figure(value, "assumed")
    assert derived(lambda a: 2 * a, exact, source="").low is None


@given(st.lists(bases, min_size=1, max_size=4), st.permutations(range(4)))
def test_basis_is_the_weakest_in_any_order(known_bases, order):
    figures = [figure(1.0, basis) for basis in known_bases]
    basis = derived_basis(*figures)
    assert basis == derived_basis(
        *[figures[place] for place in order if place < len(figures)]
    )
    assert (basis == "assumed") == ("assumed" in known_bases)
    assert (basis == "given") == (set(known_bases) == {"given"})
    assert basis != "measured"
