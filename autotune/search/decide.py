"""Search space of a training step's settings, and its prediction. Pure.

All configurations are predicted from trials of a part. Log throughput is modelled as a
Gaussian process over the configurations of a small discrete space: a constant, an
effect of each setting, an effect of each pair of settings, and a residual of each
configuration. Micro-batch sizes that are close have similar effects. The mean before
any window is a share of the log throughput that traces predict. This share and the
scales of the other parts are the most likely of a few candidates, given the windows.

Sources: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2
and 5; expected improvement is Jones, Schonlau and Welch, Journal of Global Optimization
13, 1998.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evidence.explore import KNOBS, Configuration
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.workers.decide.worker_count import ladder
from trainer.formats.batch_split import Layout

ROW_DOUBLINGS = 5
"""Halvings of the largest useful micro-batch down to the smallest to try: far below the
knee nothing is fastest."""
Float64 = npt.NDArray[np.float64]

ROWS_SCALE = 1.5
"""Length scale in doublings of the micro-batch: effects this far apart have a
correlation of 61 %."""
LEVEL_VARIANCE = 4.0
"""Prior variance of the constant, large because it is unknown."""
EFFECT_SIGMAS = (0.1, 0.3, 0.7)
"""Candidate standard deviations of a setting's effect on log throughput: 0.3 is a third
faster or slower."""
PAIR_SHARES = (0.03, 0.1, 0.4)
"""Candidate variances of a pair's effect, as a share of a single setting's."""
CELL_SIGMA = 0.03
PREDICTED_SHARES = (1.0, 0.5, 0.0)
"""Candidate shares of the predicted log ratios in the prior mean: 0 gives up a
prediction that windows contradict."""
NOISE_SIGMAS = (0.01, 0.02, 0.035, 0.06, 0.1, 0.16)
"""Candidate standard deviations of the noise of one full window."""
SHORT_NOISE = 2.0
"""Standard deviation of a short window's noise, as a multiple of a full window's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Timed window of one configuration."""

    cell: int
    log_ratio: float
    """Logarithm of non-padding tokens/s over those of the starting configuration in the
    same round."""
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Prediction for every configuration."""

    mean: Float64
    """Mean log ratio to the starting configuration, shape (cells,)."""
    covariance: Float64
    """Covariance of the long-run log ratios, without window noise, shape (cells,
    cells)."""
    noise_sigma: float
    """Standard deviation of a full window's noise."""

    @property
    def sigma(self) -> Float64:
        """Standard deviation of each log ratio, shape (cells,)."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance), 1e-12)))


def posterior(
    cells: Sequence[Configuration],
    seen: Sequence[Seen],
    predicted: Mapping[int, float] | None = None,
) -> Posterior:
    """Predict all configurations from windows of some and from log ratios of traces.

    Raises:
        ValueError: If there are no windows.
    """
    if not seen:
        raise ValueError("there are no windows")
    # Windows of one configuration and length count as their mean; their scatter informs
    # the noise alone.
    groups: dict[tuple[int, bool], list[float]] = {}
    for one in seen:
        groups.setdefault((one.cell, one.short), []).append(one.log_ratio)
    keys = sorted(groups)
    at = np.array([cell for cell, _ in keys])
    wider = np.array([SHORT_NOISE**2 if short else 1.0 for _, short in keys])
    means = np.array([math.fsum(groups[key]) / len(groups[key]) for key in keys])
    own = np.diag(wider / np.array([len(groups[key]) for key in keys]))
    off = [
        math.fsum((one - mean) ** 2 for one in groups[key])
        for key, mean in zip(keys, means, strict=True)
    ]
    sigmas = np.array(NOISE_SIGMAS)
    of_scatter = (len(keys) - len(seen)) * np.log(sigmas) - (
        np.array(off) / wider
    ).sum() / (2 * sigmas**2)
    singles, pairs = _alike(tuple(cells))
    there, same = np.ix_(at, at), at[:, None] == at
    shares = np.array(PREDICTED_SHARES if predicted else (0.0,))
    prior_mean = _prior_mean(cells, predicted) if predicted else np.zeros(len(cells))
    off_prior = means[:, None] - prior_mean[at, None] * shares
    fitted: list[tuple[float, float, float, float, float]] = []
    for effect, pair in itertools.product(EFFECT_SIGMAS, PAIR_SHARES):
        among = (
            LEVEL_VARIANCE
            + effect**2 * (singles[there] + pair * pairs[there])
            + CELL_SIGMA**2 * same
        )
        fits = (
            _log_likelihoods(among + sigmas[:, None, None] ** 2 * own, off_prior)
            + of_scatter[:, None]
        )
        which, of_share = divmod(int(fits.argmax()), len(shares))
        fitted.append(
            (
                float(fits[which, of_share]),
                NOISE_SIGMAS[which],
                effect,
                pair,
                float(shares[of_share]),
            )
        )
    _, noise, effect, pair, share = max(fitted, key=lambda one: one[0])
    prior = (
        LEVEL_VARIANCE
        + effect**2 * (singles + pair * pairs)
        + CELL_SIGMA**2 * np.eye(len(cells))
    )
    solve = np.linalg.inv(prior[there] + noise**2 * own)
    across = prior[:, at]
    covariance = np.asarray(prior - across @ solve @ across.T)
    mean = share * prior_mean + across @ solve @ (means - share * prior_mean[at])
    return Posterior(mean=np.asarray(mean), covariance=covariance, noise_sigma=noise)


def _prior_mean(
    cells: Sequence[Configuration], predicted: Mapping[int, float]
) -> Float64:
    """Return the predicted log ratios of all configurations, shape (cells,).

    Those without a prediction get one from the same model.
    """
    (singles, pairs), at = _alike(tuple(cells)), list(predicted)
    effects = EFFECT_SIGMAS[1] ** 2 * (singles + PAIR_SHARES[1] * pairs)
    prior = LEVEL_VARIANCE + effects + CELL_SIGMA**2 * np.eye(len(cells))
    return np.asarray(
        prior[:, at] @ np.linalg.solve(prior[np.ix_(at, at)], list(predicted.values()))
    )


@functools.lru_cache(maxsize=2)
def _alike(cells: tuple[Configuration, ...]) -> tuple[Float64, Float64]:
    """Return the prior correlations of single settings, and of pairs of settings.

    They are summed over the settings that vary.
    """
    varying = [one for name in KNOBS if (one := _alike_in(cells, name)).min() < 1]
    none = np.zeros((len(cells), len(cells)))
    return sum(varying, none), sum(
        (one * other for one, other in itertools.combinations(varying, 2)), none
    )


def _alike_in(cells: Sequence[Configuration], name: str) -> Float64:
    values = [getattr(cell, name) for cell in cells]
    if name == "micro_batch_size":
        logs = np.log2(np.array(values, dtype=np.float64))
        return np.asarray(
            np.exp(-((logs[:, None] - logs[None, :]) ** 2) / (2 * ROWS_SCALE**2))
        )
    codes = np.unique(np.array([str(value) for value in values]), return_inverse=True)[
        1
    ]
    return np.asarray(codes[:, None] == codes[None, :], dtype=np.float64)


def _log_likelihoods(covariances: Float64, y: Float64) -> Float64:
    """Return log likelihoods of the columns of y under each covariance.

    Shapes: covariances (several, n, n), y (n, k), result (several, k).
    """
    low = np.linalg.cholesky(covariances)
    half = np.linalg.solve(low, np.broadcast_to(y, (*low.shape[:2], y.shape[1])))
    return np.asarray(
        -0.5 * (half**2).sum(axis=1)
        - np.log(np.diagonal(low, axis1=1, axis2=2)).sum(axis=1)[:, None]
    )


def expected_improvement(found: Posterior, best: float) -> Float64:
    """Return each configuration's expected improvement over ``best``, shape (cells,).

    It is in logarithms.
    """
    return _expected_gain(found.mean - best, found.sigma)


def expected_gain_over(found: Posterior, one: int) -> Float64:
    """Return each configuration's expected improvement over ``one``, shape (cells,).

    It is in logarithms; that of ``one`` itself is about 0.
    """
    variance = (
        np.diag(found.covariance)
        + found.covariance[one, one]
        - 2 * found.covariance[one]
    )
    return _expected_gain(
        found.mean - found.mean[one], np.sqrt(np.maximum(variance, 1e-12))
    )


def _expected_gain(ahead: Float64, sigma: Float64) -> Float64:
    """Return the mean of the positive part of normal distributions."""
    z = ahead / sigma
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in z])
    return np.asarray(np.maximum(0.0, sigma * (z * below + density)))


def knob_space(
    starting: Configuration,
    levels: Mapping[str, Sequence[object]],
    global_batch_size: Mapping[Layout, int],
    ranks: int,
    max_micro_batch_size: Callable[[Configuration], int],
) -> tuple[Configuration, ...]:
    """Return all configurations, the starting one first.

    Equal tokens are fewer packed sequences than padded ones.
    """
    cells = [with_split_batch(starting, global_batch_size, ranks)]
    for values in itertools.product(*levels.values()):
        one = starting.but(**dict(zip(levels, values, strict=True))).kind
        sizes = micro_batches(
            global_batch_size[one.layout], ranks, max_micro_batch_size(one)
        )
        cells += [one.but(micro_batch_size=rows) for rows in sizes if one.possible]
    return tuple(dict.fromkeys(cells))


def with_split_batch(
    knobs: Configuration, global_batch_size: Mapping[Layout, int], ranks: int
) -> Configuration:
    """Return the configuration with the global batch split.

    Its micro-batch size is the one that results from the split.
    """
    split = split_global_batch(
        global_batch_size[knobs.layout], knobs.micro_batch_size, ranks
    )
    return knobs.but(micro_batch_size=split.micro_batch_size)


def micro_batches(
    global_batch_size: int, ranks: int, max_micro_batch_size: int
) -> list[int]:
    """Return micro-batch sizes to try, as the global batch is split.

    They are the largest useful size and powers of two below it. There are none if a
    rank would idle.
    """
    largest = min(max_micro_batch_size, -(-global_batch_size // ranks))
    if largest < 1 or global_batch_size < ranks:
        return []
    kept = [rows for rows in ladder(largest) if rows * 2**ROW_DOUBLINGS >= largest]
    return sorted(
        {
            split_global_batch(global_batch_size, rows, ranks).micro_batch_size
            for rows in kept
        }
    )


def useful_share(
    knobs: Configuration, global_batch_size: Mapping[Layout, int], ranks: int
) -> float:
    """Return the share of the computed sequences that the global batch fills."""
    split = split_global_batch(
        global_batch_size[knobs.layout], knobs.micro_batch_size, ranks
    )
    computed = split.gradient_accumulation_steps * split.micro_batch_size * ranks
    return global_batch_size[knobs.layout] / computed
