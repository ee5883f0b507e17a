"""Prediction of configurations from windows of some."""

import itertools
import math
import random

import numpy as np
import pytest

from autotune.sampler.decide import effects_model
from autotune.sampler.decide.discrete_space import LENGTH_SCALE_DOUBLINGS, space_of
from autotune.sampler.decide.effects_model import Observation, posterior

VALUES = {
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "full"),
    "layout": ("packed", "padded"),
    "size": (1, 4, 16),
}
CONFIGURATIONS = [
    dict(zip(VALUES, combination, strict=True))
    for combination in itertools.product(*VALUES.values())
]
SPACE = space_of(VALUES)
CODES = SPACE.encode(CONFIGURATIONS)


def predict(observations, predicted=None):
    return posterior(SPACE, CODES, observations, predicted)


def covariance_of(predictions):
    columns = [predictions.covariance_with(n) for n in range(len(CONFIGURATIONS))]
    return np.column_stack(columns)


def correlations_of(name):
    values = np.array([configuration[name] for configuration in CONFIGURATIONS])
    if name == "size":
        doublings = np.log2(values[:, None] / values)
        return np.exp(-(doublings**2) / (2 * LENGTH_SCALE_DOUBLINGS**2))
    return (values[:, None] == values).astype(float)


def posterior_of_single_windows(observations):
    """Return mean, covariance and noise window by window, from the formulas."""
    each = [correlations_of(name) for name in VALUES]
    singles = sum(each)
    pairs = sum(first * second for first, second in itertools.combinations(each, 2))
    numbers = [window.configuration for window in observations]
    log_ratios = np.array([window.log_ratio for window in observations])
    factors = [
        effects_model.SHORT_NOISE**2 if window.short else 1.0 for window in observations
    ]
    candidates = []
    scales = (
        effects_model.EFFECT_SIGMAS,
        effects_model.PAIR_SHARES,
        effects_model.NOISE_SIGMAS,
    )
    residual = effects_model.RESIDUAL_SIGMA**2 * np.eye(len(CONFIGURATIONS))
    for effect, pair, noise in itertools.product(*scales):
        effects = effect**2 * (singles + pair * pairs)
        prior = effects_model.LEVEL_VARIANCE + residual + effects
        among = prior[np.ix_(numbers, numbers)] + noise**2 * np.diag(factors)
        across = prior[:, numbers]
        mean = across @ np.linalg.solve(among, log_ratios)
        explained = across @ np.linalg.solve(among, across.T)
        likelihood = (
            -0.5 * log_ratios @ np.linalg.solve(among, log_ratios)
            - 0.5 * np.linalg.slogdet(among)[1]
        )
        candidates.append((likelihood, mean, prior - explained, noise))
    return max(candidates, key=lambda candidate: candidate[0])[1:]


@pytest.mark.parametrize("seed", range(5))
def test_grouped_windows_equal_single_windows(seed):
    rng = random.Random(seed)
    repeated = [rng.randrange(len(CONFIGURATIONS)) for _ in range(6)] * 3
    single = [rng.randrange(len(CONFIGURATIONS)) for _ in range(4)]
    observations = [
        Observation(
            configuration=number,
            log_ratio=rng.gauss(0.05 * number, 0.03),
            short=rng.random() < 0.3,
        )
        for number in repeated + single
    ]
    mean, covariance, noise = posterior_of_single_windows(observations)
    predictions = predict(observations)
    assert predictions.noise_sigma == noise
    assert predictions.mean == pytest.approx(mean, abs=1e-8)
    assert covariance_of(predictions) == pytest.approx(covariance, abs=1e-8)
    assert predictions.sigma**2 == pytest.approx(np.diag(covariance), abs=1e-8)


def test_order_of_windows_makes_no_difference():
    rng = random.Random(0)
    observations = [
        Observation(configuration=rng.randrange(24), log_ratio=rng.gauss(0, 0.3))
        for _ in range(20)
    ]
    mixed = predict(rng.sample(observations, len(observations)))
    predictions = predict(observations)
    assert mixed.noise_sigma == predictions.noise_sigma
    assert (mixed.mean == predictions.mean).all()
    assert (mixed.sigma == predictions.sigma).all()


def learnt(rate, numbers):
    """Return the posterior of four noisy windows of each of these configurations."""
    rng = random.Random(0)
    return predict(
        [
            Observation(
                configuration=number,
                log_ratio=rate(CONFIGURATIONS[number]) + rng.gauss(0, 0.01),
            )
            for number in numbers
            for _ in range(4)
        ]
    )


def test_effects_add_up_for_unread_configurations():
    def rate(configuration):
        return (
            0.4 * (configuration["precision"] == "bf16")
            - 0.3 * (configuration["checkpointing"] == "full")
            + 0.1 * math.log2(configuration["size"])
        )

    observed = random.Random(0).sample(range(len(CONFIGURATIONS)), 10)
    rates = [rate(configuration) for configuration in CONFIGURATIONS]
    mean = learnt(rate, observed).mean
    errors = [
        abs(mean[number] - rates[number])
        for number in range(len(CONFIGURATIONS))
        if number not in observed
    ]
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.06 * (max(rates) - min(rates))


def test_learns_pairs_that_do_not_add_up():
    def rate(configuration):
        return 0.6 * (
            configuration["precision"] == "bf16" and configuration["layout"] == "packed"
        )

    without_checkpointing = [
        number
        for number, configuration in enumerate(CONFIGURATIONS)
        if configuration["checkpointing"] == "none"
    ]
    mean = learnt(rate, without_checkpointing).mean
    both = {"precision": "bf16", "checkpointing": "full", "layout": "packed", "size": 4}
    assert mean[CONFIGURATIONS.index(both)] == pytest.approx(0.6, abs=0.15)
    padded = both | {"layout": "padded"}
    assert mean[CONFIGURATIONS.index(padded)] == pytest.approx(0.0, abs=0.15)


def test_posterior_requires_windows():
    with pytest.raises(ValueError, match="there are no windows"):
        predict([])


RATES = [
    0.4 * (configuration["precision"] == "bf16")
    - 0.3 * (configuration["checkpointing"] == "full")
    for configuration in CONFIGURATIONS
]
START = [Observation(configuration=0, log_ratio=0.0)] * 8
PREDICTED = {number: rate for number, rate in enumerate(RATES) if number % 4 != 3}


def test_prediction_holds_before_windows():
    assert predict(START, PREDICTED).mean == pytest.approx(RATES, abs=0.05)


def test_prediction_that_windows_contradict_is_dropped():
    wrong = {number: -3 * rate for number, rate in PREDICTED.items()}
    observations = START + [
        Observation(configuration=number, log_ratio=RATES[number])
        for number in range(0, 24, 2)
    ]
    assert predict(observations, wrong).mean == pytest.approx(
        predict(observations).mean, abs=1e-9
    )
