"""Expected improvement of configurations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.sampler.decide.discrete_space import space_of
from autotune.sampler.decide.effects_model import Observation, posterior
from autotune.sampler.decide.improvement import (
    augmented_expected_improvement,
    expected_gain_over,
    expected_improvement,
)

SIZES = [1, 2, 4, 8, 16, 32]
SPACE = space_of({"size": SIZES})
CODES = SPACE.encode([{"size": size} for size in SIZES])
WINDOWS = st.lists(
    st.builds(
        Observation,
        configuration=st.integers(0, len(SIZES) - 1),
        log_ratio=st.floats(-1, 1),
        short=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@given(WINDOWS, st.floats(-2, 2), st.floats(0, 2))
def test_falls_with_the_value_to_improve_on(windows, best, more):
    predictions = posterior(SPACE, CODES, windows)
    gains = expected_improvement(predictions, best)
    assert (gains >= np.maximum(0, predictions.mean - best) - 1e-6).all()
    assert (expected_improvement(predictions, best + more) <= gains + 1e-9).all()


@given(WINDOWS, st.integers(0, len(SIZES) - 1))
def test_gain_over_itself_is_nothing(windows, configuration):
    gains = expected_gain_over(posterior(SPACE, CODES, windows), configuration)
    assert gains[configuration] == pytest.approx(0, abs=1e-4)
    assert (gains >= 0).all()


def test_matches_draws_from_the_posterior():
    windows = [
        Observation(configuration=0, log_ratio=0.0),
        Observation(configuration=3, log_ratio=0.2),
    ]
    predictions = posterior(SPACE, CODES, windows)
    draws = np.random.default_rng(0).normal(
        predictions.mean, predictions.sigma, size=(400_000, len(SIZES))
    )
    expected = np.maximum(draws - 0.15, 0).mean(axis=0)
    assert expected_improvement(predictions, 0.15) == pytest.approx(expected, rel=0.03)


def test_gain_counts_what_two_configurations_share():
    windows = [Observation(configuration=0, log_ratio=0.0)]
    predictions = posterior(SPACE, CODES, windows)
    gains = expected_gain_over(predictions, 4)
    independent = expected_improvement(predictions, float(predictions.mean[4]))
    assert gains[5] < independent[5]


@given(WINDOWS, st.floats(-2, 2))
def test_repetition_is_discounted(windows, best):
    predictions = posterior(SPACE, CODES, windows)
    augmented = augmented_expected_improvement(predictions, best)
    assert (augmented >= 0).all()
    assert (augmented <= expected_improvement(predictions, best)).all()


def test_more_windows_are_discounted_more():
    windows = [Observation(configuration=0, log_ratio=0.0)] * 2
    windows += [Observation(configuration=5, log_ratio=0.0)] * 20
    predictions = posterior(SPACE, CODES, windows)
    improvement = expected_improvement(predictions, -1.0)
    augmented = augmented_expected_improvement(predictions, -1.0)
    discounts = augmented / improvement
    assert discounts[5] < discounts[0] < discounts[2]
