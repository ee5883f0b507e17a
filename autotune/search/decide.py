"""Which settings of the step are explored together, and what trials of some say of all of them. Pure.

Logarithms of throughput are modelled as a Gaussian process over the cells of a small discrete space: a constant, an
effect of each knob, an effect of each pair of knobs, and what is left of a single cell. Micro-batches that are close
have close effects. The scales of these parts are those, of a few, under which the readings are most likely.

Sources: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2 and 5; expected improvement is
Jones, Schonlau and Welch, Journal of Global Optimization 13, 1998.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.profiles.decide.batch_split import split_global_batch
from autotune.search.values import KNOBS, Configuration
from trainer.config.train_config import Layout

ROW_DOUBLINGS = 5
"""Micro-batches from the largest useful one down to one so many times halved: far below the knee nothing is fastest."""
Float64 = npt.NDArray[np.float64]

ROWS_SCALE = 1.5
"""Micro-batches so many doublings apart share 61 % of their effect's correlation."""
LEVEL_VARIANCE = 4.0
"""Of the constant: a priori nothing is known of it."""
EFFECT_SIGMAS = (0.1, 0.3, 0.7)
"""Of a knob's effect on the logarithm: 0.3 is a third faster or slower."""
PAIR_SHARES = (0.03, 0.1, 0.4)
"""Variance of a pair's effect, as part of that of one knob."""
CELL_SIGMA = 0.03
NOISE_SIGMAS = (0.01, 0.02, 0.035, 0.06, 0.1, 0.16)
"""Of one full window."""
SHORT_NOISE = 2.0
"""A short window is so much noisier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A window."""

    cell: int
    log_ratio: float
    """Of real tokens/s to the unexplored settings in the same round."""
    short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What is believed of every cell."""

    mean: Float64
    """Of the logarithm of the ratio, shape (cells,)."""
    covariance: Float64
    """Shape (cells, cells); of what a cell gives in the long run, without the noise of a window."""
    noise_sigma: float
    """Of a full window."""

    @property
    def sigma(self) -> Float64:
        """Shape (cells,)."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance), 1e-12)))


def posterior(cells: Sequence[Configuration], seen: Sequence[Seen]) -> Posterior:
    """What the readings say of all cells; their order does not matter.

    Raises:
        ValueError: If there is none.
    """
    if not seen:
        raise ValueError("nothing was read")
    # Windows of the same cell and length count as their mean; what they are off it tells of the noise alone.
    groups: dict[tuple[int, bool], list[float]] = {}
    for one in seen:
        groups.setdefault((one.cell, one.short), []).append(one.log_ratio)
    keys = sorted(groups)
    at = np.array([cell for cell, _ in keys])
    wider = np.array([SHORT_NOISE**2 if short else 1.0 for _, short in keys])
    means = np.array([math.fsum(groups[key]) / len(groups[key]) for key in keys])
    own = np.diag(wider / np.array([len(groups[key]) for key in keys]))
    off = [math.fsum((one - mean) ** 2 for one in groups[key]) for key, mean in zip(keys, means, strict=True)]
    sigmas = np.array(NOISE_SIGMAS)
    of_scatter = (len(keys) - len(seen)) * np.log(sigmas) - (np.array(off) / wider).sum() / (2 * sigmas**2)
    singles, pairs = _alike(tuple(cells))
    there, same = np.ix_(at, at), at[:, None] == at
    best: tuple[float, float, float, float] | None = None
    for effect, pair in itertools.product(EFFECT_SIGMAS, PAIR_SHARES):
        among = LEVEL_VARIANCE + effect**2 * (singles[there] + pair * pairs[there]) + CELL_SIGMA**2 * same
        fits = _log_likelihoods(among + sigmas[:, None, None] ** 2 * own, means) + of_scatter
        which = int(fits.argmax())
        if best is None or fits[which] > best[0]:
            best = float(fits[which]), NOISE_SIGMAS[which], effect, pair
    assert best is not None
    _, noise, effect, pair = best
    prior = LEVEL_VARIANCE + effect**2 * (singles + pair * pairs) + CELL_SIGMA**2 * np.eye(len(cells))
    solve = np.linalg.inv(prior[there] + noise**2 * own)
    across = prior[:, at]
    return Posterior(
        mean=np.asarray(across @ solve @ means),
        covariance=np.asarray(prior - across @ solve @ across.T),
        noise_sigma=noise,
    )


@functools.lru_cache(maxsize=8)
def _alike(cells: tuple[Configuration, ...]) -> tuple[Float64, Float64]:
    """How much effects of single knobs, and of pairs of them, have in common between cells."""
    each = [_alike_in(cells, name) for name in KNOBS]
    varying = [one for one in each if one.min() < 1]
    n = len(cells)
    singles = sum(varying, np.zeros((n, n)))
    pairs = sum((one * other for one, other in itertools.combinations(varying, 2)), np.zeros((n, n)))
    return singles, pairs


def _alike_in(cells: Sequence[Configuration], name: str) -> Float64:
    values = [getattr(cell, name) for cell in cells]
    if name == "micro_batch_size":
        logs = np.log2(np.array(values, dtype=np.float64))
        return np.asarray(np.exp(-((logs[:, None] - logs[None, :]) ** 2) / (2 * ROWS_SCALE**2)))
    codes = np.unique(np.array([str(value) for value in values]), return_inverse=True)[1]
    return np.asarray(codes[:, None] == codes[None, :], dtype=np.float64)


def _log_likelihoods(covariances: Float64, y: Float64) -> Float64:
    """Of each of several covariances, shape (several, n, n), but for a constant."""
    low = np.linalg.cholesky(covariances)
    half = np.linalg.solve(low, np.broadcast_to(y[:, None], (*low.shape[:2], 1)))[..., 0]
    return np.asarray(-0.5 * (half**2).sum(axis=1) - np.log(np.diagonal(low, axis1=1, axis2=2)).sum(axis=1))


def expected_improvement(found: Posterior, best: float) -> Float64:
    """By how much each cell is expected to beat a figure, in logarithms; shape (cells,)."""
    return _expected_gain(found.mean - best, found.sigma)


def expected_gain_over(found: Posterior, one: int) -> Float64:
    """By how much each cell is expected to beat another one, in logarithms; shape (cells,), about 0 for itself."""
    variance = np.diag(found.covariance) + found.covariance[one, one] - 2 * found.covariance[one]
    return _expected_gain(found.mean - found.mean[one], np.sqrt(np.maximum(variance, 1e-12)))


def _expected_gain(ahead: Float64, sigma: Float64) -> Float64:
    """The mean of what is above nothing of a normal distribution."""
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
    """Return all cells, the unexplored one first: each value of every knob, and every useful micro-batch.

    The global batch is given by layout: the same non-padding tokens are fewer packed rows than padded ones.
    """
    cells = [with_split_batch(starting, global_batch_size, ranks)]
    for values in itertools.product(*levels.values()):
        one = starting.but(**dict(zip(levels, values, strict=True))).kind
        sizes = micro_batches(global_batch_size[one.layout], ranks, max_micro_batch_size(one))
        cells += [one.but(micro_batch_size=rows) for rows in sizes]
    return tuple(dict.fromkeys(cells))


def with_split_batch(knobs: Configuration, global_batch_size: Mapping[Layout, int], ranks: int) -> Configuration:
    """With the rows that a micro-batch really has once the global batch is dealt."""
    split = split_global_batch(global_batch_size[knobs.layout], knobs.micro_batch_size, ranks)
    return knobs.but(micro_batch_size=split.micro_batch_size)


def micro_batches(global_batch_size: int, ranks: int, max_micro_batch_size: int) -> list[int]:
    """Micro-batches worth trying, as dealt: the largest useful one, and powers of two below it, ascending.

    None where the global batch would leave a rank without a row.
    """
    largest = min(max_micro_batch_size, -(-global_batch_size // ranks))
    if largest < 1 or global_batch_size < ranks:
        return []
    asked = {largest} | {2**exponent for exponent in range(largest.bit_length()) if 2**exponent <= largest}
    kept = [rows for rows in asked if rows * 2**ROW_DOUBLINGS >= largest]
    return sorted({split_global_batch(global_batch_size, rows, ranks).micro_batch_size for rows in kept})


def useful_share(knobs: Configuration, global_batch_size: Mapping[Layout, int], ranks: int) -> float:
    """Part of the computed rows that the global batch fills."""
    split = split_global_batch(global_batch_size[knobs.layout], knobs.micro_batch_size, ranks)
    computed = split.gradient_accumulation_steps * split.micro_batch_size * ranks
    return global_batch_size[knobs.layout] / computed
