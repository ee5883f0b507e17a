"""Prediction of all configurations from windows of some. Pure.

Log throughput is modelled as a Gaussian process over the configurations of a small
discrete space: a constant, an effect of each setting, an effect of each pair of
settings, and a residual of each configuration. Numbers that are close have similar
effects. The mean before any window is a share of the log ratios that are predicted,
such as by a trace. This share and the scales of the other parts are the most likely of
a few candidates, given the windows.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapters
2 and 5. Scales are candidates rather than optimised, and their uncertainty is left out.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.sampler.decide.discrete_space import Codes, DiscreteSpace, Float64

LEVEL_VARIANCE = 4.0
"""Prior variance of the constant, large because it is unknown."""
EFFECT_SIGMAS = (0.1, 0.3, 0.7)
"""Candidate standard deviations of a setting's effect on log throughput: 0.3 is a third
faster or slower."""
PAIR_SHARES = (0.03, 0.1, 0.4)
"""Candidate variances of a pair's effect, as a share of a single setting's."""
RESIDUAL_SIGMA = 0.03
"""Standard deviation of a configuration's own residual."""
PREDICTED_SHARES = (1.0, 0.5, 0.0)
"""Candidate shares of the predicted log ratios in the prior mean: 0 gives up a
prediction that windows contradict."""
NOISE_SIGMAS = (0.01, 0.02, 0.035, 0.06, 0.1, 0.16)
"""Candidate standard deviations of the noise of one full window."""
SHORT_NOISE = 2.0
"""Standard deviation of a short window's noise, as a multiple of a full window's."""
_LEAST_VARIANCE = 1e-12
"""Variance below which rounding dominates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A measured value of a trial, as a logarithm or on the study's own scale."""

    value: float
    short: bool = False
    """True if it was measured for a shorter time, so that it is noisier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A timed window of one configuration."""

    configuration: int
    """Index of the configuration."""
    log_ratio: float
    """Logarithm of throughput over that of the starting configuration in the same
    round."""
    short: bool = False
    """True for a short window, which is noisier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Covariance of log ratios before any window."""

    space: DiscreteSpace
    effect_sigma: float = EFFECT_SIGMAS[1]
    """Standard deviation of a single setting's effect."""
    pair_share: float = PAIR_SHARES[1]
    """Variance of a pair's effect, as a share of a single setting's."""

    def covariance(self, rows: Codes, columns: Codes) -> Float64:
        """Return the covariance of configurations, shape (rows, columns)."""
        singles, pairs = self.space.similarities(rows, columns)
        effects = self.effect_sigma**2 * (singles + self.pair_share * pairs)
        is_same = (rows[:, None, :] == columns[None, :, :]).all(axis=2)
        return np.asarray(LEVEL_VARIANCE + effects + RESIDUAL_SIGMA**2 * is_same)

    @property
    def variance(self) -> float:
        """Variance of each configuration."""
        settings = len(self.space.settings)
        effects = settings + self.pair_share * settings * (settings - 1) / 2
        return LEVEL_VARIANCE + self.effect_sigma**2 * effects + RESIDUAL_SIGMA**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Prediction of every configuration, given the windows."""

    mean: Float64
    """Mean log ratio to the starting configuration, shape (configurations,)."""
    noise_sigma: float
    """Standard deviation of a full window's noise."""
    prior: Prior
    codes: Codes
    """Codes of all configurations."""
    observed_covariance: Float64
    """Prior covariance of all configurations with those that have windows, shape
    (configurations, observed)."""
    precision: Float64
    """Inverse of the covariance of the windows' means, shape (observed, observed)."""

    @property
    def sigma(self) -> Float64:
        """Standard deviation of each log ratio, without window noise."""
        explained = (
            (self.observed_covariance @ self.precision) * self.observed_covariance
        ).sum(axis=1)
        variance = self.prior.variance - explained
        return np.asarray(np.sqrt(np.maximum(variance, _LEAST_VARIANCE)))

    def covariance_with(self, configuration: int) -> Float64:
        """Return the covariance of all log ratios with that of one configuration."""
        codes = self.codes[configuration : configuration + 1]
        before = self.prior.covariance(self.codes, codes)[:, 0]
        explained = self.precision @ self.observed_covariance[configuration]
        return np.asarray(before - self.observed_covariance @ explained)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WindowMeans:
    """Windows, grouped by configuration and length.

    A group counts as its mean. The scatter within groups informs the noise alone.
    """

    configurations: list[int]
    """Configuration of each group."""
    log_ratios: Float64
    """Mean of each group."""
    variance_factors: Float64
    """Variance of each mean, as a multiple of that of a full window."""
    scattered_windows: int
    """Number of windows beyond the first of each group."""
    scatter: float
    """Sum of squared deviations from the groups' means, scaled to full windows."""

    def scatter_log_likelihoods(self, sigmas: Float64) -> Float64:
        """Return the log likelihood of the scatter at each noise, up to a constant."""
        return np.asarray(
            -self.scattered_windows * np.log(sigmas) - self.scatter / (2 * sigmas**2)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Scales of the model, and how likely the windows are with them."""

    log_likelihood: float
    prior: Prior
    noise_sigma: float
    predicted_share: float


def posterior(
    space: DiscreteSpace,
    codes: Codes,
    observations: Sequence[Observation],
    predicted: Mapping[int, float] | None = None,
) -> Posterior:
    """Predict all configurations from windows of some.

    Args:
        space: Settings of the configurations.
        codes: Codes of all configurations.
        observations: Windows of some of them.
        predicted: Log ratios by a trace or a model, by index of the configuration.

    Raises:
        ValueError: If there are no windows.
    """
    if not observations:
        raise ValueError("there are no windows")
    windows = _group(observations)
    predicted_mean = np.zeros(len(codes))
    if predicted:
        predicted_mean = _interpolate(space, codes, predicted)
    fit = max(
        _fits(space, codes, windows, predicted_mean, has_predictions=bool(predicted)),
        key=lambda fit: fit.log_likelihood,
    )
    observed_covariance = fit.prior.covariance(codes, codes[windows.configurations])
    noise_covariance = fit.noise_sigma**2 * np.diag(windows.variance_factors)
    precision = np.asarray(
        np.linalg.inv(observed_covariance[windows.configurations] + noise_covariance),
        dtype=np.float64,
    )
    mean_before = fit.predicted_share * predicted_mean
    surprise = windows.log_ratios - mean_before[windows.configurations]
    return Posterior(
        mean=np.asarray(mean_before + observed_covariance @ precision @ surprise),
        noise_sigma=fit.noise_sigma,
        prior=fit.prior,
        codes=codes,
        observed_covariance=observed_covariance,
        precision=precision,
    )


def _fits(
    space: DiscreteSpace,
    codes: Codes,
    windows: _WindowMeans,
    predicted_mean: Float64,
    *,
    has_predictions: bool,
) -> Iterator[_Fit]:
    """Yield the most likely noise and share of predictions, for each pair of scales."""
    observed_codes = codes[windows.configurations]
    shares = PREDICTED_SHARES if has_predictions else (0.0,)
    # Deviations from the prior mean, a column for each candidate share.
    deviations = windows.log_ratios[:, None] - np.outer(
        predicted_mean[windows.configurations], shares
    )
    noise_sigmas = np.array(NOISE_SIGMAS)
    noise_covariances = noise_sigmas[:, None, None] ** 2 * np.diag(
        windows.variance_factors
    )
    scatter_fits = windows.scatter_log_likelihoods(noise_sigmas)[:, None]
    for effect_sigma, pair_share in itertools.product(EFFECT_SIGMAS, PAIR_SHARES):
        prior = Prior(space=space, effect_sigma=effect_sigma, pair_share=pair_share)
        covariance = prior.covariance(observed_codes, observed_codes)
        log_likelihoods = scatter_fits + _log_likelihoods(
            covariance + noise_covariances, deviations
        )
        noise_index, share_index = divmod(int(log_likelihoods.argmax()), len(shares))
        yield _Fit(
            log_likelihood=float(log_likelihoods[noise_index, share_index]),
            prior=prior,
            noise_sigma=NOISE_SIGMAS[noise_index],
            predicted_share=shares[share_index],
        )


def _group(observations: Sequence[Observation]) -> _WindowMeans:
    """Group windows by configuration and length."""
    groups: dict[tuple[int, bool], list[float]] = {}
    for window in observations:
        key = (window.configuration, window.short)
        groups.setdefault(key, []).append(window.log_ratio)
    configurations, means, variance_factors, scatters = [], [], [], []
    for (configuration, short), log_ratios in sorted(groups.items()):
        window_factor = SHORT_NOISE**2 if short else 1.0
        mean = math.fsum(log_ratios) / len(log_ratios)
        squares = math.fsum((log_ratio - mean) ** 2 for log_ratio in log_ratios)
        configurations.append(configuration)
        means.append(mean)
        variance_factors.append(window_factor / len(log_ratios))
        scatters.append(squares / window_factor)
    return _WindowMeans(
        configurations=configurations,
        log_ratios=np.array(means),
        variance_factors=np.array(variance_factors),
        scattered_windows=len(observations) - len(groups),
        scatter=math.fsum(scatters),
    )


def _interpolate(
    space: DiscreteSpace, codes: Codes, predicted: Mapping[int, float]
) -> Float64:
    """Return predicted log ratios of all configurations.

    Those without a prediction get one from the same model, at its middle scales.
    """
    prior = Prior(space=space)
    known = list(predicted)
    across = prior.covariance(codes, codes[known])
    weights = np.linalg.solve(across[known], np.array(list(predicted.values())))
    return np.asarray(across @ weights)


def _log_likelihoods(covariances: Float64, deviations: Float64) -> Float64:
    """Return log likelihoods of columns under each covariance, up to a constant.

    Args:
        covariances: Shape (covariances, n, n).
        deviations: Shape (n, columns).

    Returns:
        Shape (covariances, columns).
    """
    lower = np.linalg.cholesky(covariances)
    whitened = np.linalg.solve(
        lower, np.broadcast_to(deviations, (*lower.shape[:2], deviations.shape[1]))
    )
    log_determinants = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
    return np.asarray(-0.5 * (whitened**2).sum(axis=1) - log_determinants[:, None])
