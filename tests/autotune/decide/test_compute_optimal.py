import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.compute_optimal import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    Optimal,
    is_far,
    off_optimum,
    optimal_for,
    was_fitted,
)

flops = st.floats(1e12, 1e28)


@pytest.mark.parametrize(
    ("compute", "parameters", "tokens"), [(6e23, 70.7e9, 1.41e12), (1e24, 91.3e9, 1.83e12), (5.88e23, 70e9, 1.4e12)]
)
def test_the_formula_gives_known_sizes(compute, parameters, tokens):
    found = optimal_for(compute)
    assert found.parameters == pytest.approx(parameters, rel=0.003)
    assert found.tokens == pytest.approx(tokens, rel=0.004)


@given(flops)
def test_the_optimum_takes_just_that_compute(compute):
    found = optimal_for(compute)
    assert FLOPS_PER_PARAMETER_AND_TOKEN * found.parameters * found.tokens == pytest.approx(compute)
    assert off_optimum(found.parameters, found.tokens) == pytest.approx(1.0)
    assert not is_far(off_optimum(found.parameters, found.tokens))


@given(flops, st.floats(1.01, 1e4))
def test_more_compute_wants_both_larger_and_by_the_square_root(compute, factor):
    less, more = optimal_for(compute), optimal_for(factor * compute)
    assert more.parameters / less.parameters == pytest.approx(factor**0.5)
    assert more.tokens / less.tokens == pytest.approx(factor**0.5)


@given(st.floats(1e-6, 1e6))
def test_far_is_the_same_on_both_sides(ratio):
    assert is_far(ratio) == is_far(1 / ratio)


def test_small_models_were_not_fitted():
    assert not was_fitted(Optimal(parameters=1e6, tokens=2e7))
    assert was_fitted(Optimal(parameters=1e9, tokens=2e10))


@pytest.mark.parametrize("compute", [0.0, -1.0, float("nan")])
def test_no_compute_trains_nothing(compute):
    with pytest.raises(ValueError, match="train nothing"):
        optimal_for(compute)
