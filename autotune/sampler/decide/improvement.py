"""Expected improvement of configurations. Pure.

Sources: Jones, Schonlau and Welch, Journal of Global Optimization 13, 1998; augmented
expected improvement is Huang, Allen, Notz and Zeng, Journal of Global Optimization 34,
2006.
"""

import math

import numpy as np

from autotune.sampler.decide.discrete_space import Float64
from autotune.sampler.decide.effects_model import Posterior

_LEAST_VARIANCE = 1e-12
"""Variance below which rounding dominates."""


def expected_improvement(predictions: Posterior, best: float) -> Float64:
    """Return each configuration's expected improvement over ``best``.

    Args:
        predictions: Prediction of every configuration.
        best: Log ratio to improve on.

    Returns:
        Improvements in log throughput, at least 0, shape (configurations,).
    """
    return _mean_of_positive_part(predictions.mean - best, predictions.sigma)


def augmented_expected_improvement(predictions: Posterior, best: float) -> Float64:
    """Return each configuration's expected improvement, discounted for repetition.

    A further window tells less, the more windows a configuration has: the discount is
    the share of the window's standard deviation that is not noise.

    Args:
        predictions: Prediction of every configuration.
        best: Log ratio to improve on.

    Returns:
        Improvements in log throughput, at least 0, shape (configurations,).
    """
    noise_sigma = predictions.noise_sigma
    window_sigma = np.sqrt(predictions.sigma**2 + noise_sigma**2)
    improvement = expected_improvement(predictions, best)
    return np.asarray(improvement * (1 - noise_sigma / window_sigma))


def expected_gain_over(predictions: Posterior, configuration: int) -> Float64:
    """Return each configuration's expected improvement over another one.

    Args:
        predictions: Prediction of every configuration.
        configuration: Index of the one to improve on, whose own gain is about 0.

    Returns:
        Improvements in log throughput, at least 0, shape (configurations,).
    """
    covariance = predictions.covariance_with(configuration)
    variance = predictions.sigma**2 + covariance[configuration] - 2 * covariance
    return _mean_of_positive_part(
        predictions.mean - predictions.mean[configuration],
        np.sqrt(np.maximum(variance, _LEAST_VARIANCE)),
    )


def _mean_of_positive_part(mean: Float64, sigma: Float64) -> Float64:
    """Return the mean of the positive part of normal distributions."""
    z = mean / sigma
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    return np.asarray(np.maximum(0.0, sigma * (z * below + density)))
