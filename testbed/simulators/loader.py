"""Simulated trainings with DataLoader workers.

The choice of a worker count is compared with their known answer. They were settled
before the rule that they judge.

The throughput of a training is what its step and its loader allow, whichever is less:
workers add up until storage or CPUs are the limit, and cost the step a little. A window
measures that, times everything that machines do to a figure: noise, drift, neighbours
that come for a while, and single windows that something delayed. The share of a window
that waited for data has noise of its own.
"""

import math
import random
from dataclasses import dataclass

from testbed.simulators.noise import log_uniform

MAX_WORKERS = (4, 6, 8, 12, 16, 24, 32)
NOISE = (0.01, 0.10)
"""Relative standard deviation of a window's throughput; uniform between these, one for
a sweep."""
SAMPLE_LOAD_TO_STEP = (0.02, 1.3)
"""How long one worker makes a batch, in steps times the most workers; log-uniform.
Above 1 nobody gets to the ceiling.
"""
STORAGE_PROBABILITY, STORAGE_SHARE = 0.2, (0.4, 1.1)
"""Storage that gives no more than this part of what the step could take."""
KNEE_POWERS = (8.0, 16.0, math.inf)
"""How sharply the loader's limit meets the step's: batches that take unequally long
round the knee."""
SCALING_LOSS = (0.0, 0.01)
"""Share of its speed that each further worker loses to the others."""
STEP_COST = (0.0, 0.003)
"""Share by which each worker slows the step down, in half of the trainings."""
DRIFT_PROBABILITY, DRIFT_SHARE, DRIFT_WINDOWS = 0.5, (0.02, 0.15), (20, 200)
"""A slow wave: its height, and how many windows it takes."""
OUTLIER_PROBABILITY, OUTLIERS, OUTLIER_LOSS = 0.5, (0.01, 0.05), (0.1, 0.6)
"""Single windows that are held up: in how many trainings, how often there, and what
they lose."""
NEIGHBOUR_PROBABILITY, NEIGHBOURS, NEIGHBOUR_LOSS, NEIGHBOUR_WINDOWS = (
    0.3,
    (0.005, 0.03),
    (0.05, 0.4),
    (2, 12),
)
"""Neighbours that stay for some windows."""
WAIT_FLOOR = 0.004
"""A loader that keeps up is waited for by about this share, half-normally; else the
true share, with the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Figures of one window of a simulated training."""

    tokens_per_s: float
    data_wait_share: float


class SimulatedFeed:
    """One training on one machine.

    Args:
        seed: Seed of everything that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self._random = draw = random.Random(seed)
        self.max_workers = draw.choice(MAX_WORKERS)
        self.noise = draw.uniform(*NOISE)
        self._load = log_uniform(draw, SAMPLE_LOAD_TO_STEP) * self.max_workers
        self._overlaps_without_workers = draw.random() < 0.5
        self._storage = (
            draw.uniform(*STORAGE_SHARE)
            if draw.random() < STORAGE_PROBABILITY
            else math.inf
        )
        self._power = draw.choice(KNEE_POWERS)
        self._scaling_loss = draw.uniform(*SCALING_LOSS)
        self._step_cost = draw.uniform(*STEP_COST) if draw.random() < 0.5 else 0.0
        self._drift = (
            draw.uniform(*DRIFT_SHARE) if draw.random() < DRIFT_PROBABILITY else 0.0
        )
        self._drift_windows = draw.uniform(*DRIFT_WINDOWS)
        self._phase = draw.uniform(0, 2 * math.pi)
        self._outliers = (
            draw.uniform(*OUTLIERS) if draw.random() < OUTLIER_PROBABILITY else 0.0
        )
        self._neighbours = (
            draw.uniform(*NEIGHBOURS) if draw.random() < NEIGHBOUR_PROBABILITY else 0.0
        )
        self._neighbour_until, self._neighbour_loss = 0, 0.0
        self.windows = 0
        """Windows that were read."""

    def true_tokens_per_s(self, workers: int | None) -> float:
        """Return the throughput of training in the long run on a quiet machine.

        None for the workers takes cached batches, with a result of 1.
        """
        if workers is None:
            return 1.0
        step = 1 - self._step_cost * workers
        if workers == 0 and not self._overlaps_without_workers:
            return 1 / (1 + self._load)
        at_once = max(1, workers)
        supply = min(
            self._storage,
            at_once * max(0.2, 1 - self._scaling_loss * (at_once - 1)) / self._load,
        )
        if math.isinf(self._power):
            return min(step, supply)
        return float((step**-self._power + supply**-self._power) ** (-1 / self._power))

    @property
    def best_tokens_per_s(self) -> float:
        """Of all counts that are allowed."""
        return max(map(self.true_tokens_per_s, range(self.max_workers + 1)))

    def true_count(self, share: float) -> int:
        """Return the fewest workers that reach a share of the best throughput."""
        enough = share * self.best_tokens_per_s
        return next(
            count
            for count in range(self.max_workers + 1)
            if self.true_tokens_per_s(count) >= enough
        )

    def is_borderline(self, share: float, margin: float) -> bool:
        """Whether the training is a borderline case.

        The true ratio to the best of some count is then so near the share that no rule
        could tell.
        """
        best = self.best_tokens_per_s
        ratios = (
            self.true_tokens_per_s(count) / best
            for count in range(self.max_workers + 1)
        )
        return any(abs(ratio - share) < margin for ratio in ratios)

    def read(self, workers: int | None) -> Reading:
        """Read a window."""
        draw, true = self._random, self.true_tokens_per_s(workers)
        step = 1.0 if workers is None else 1 - self._step_cost * workers
        wait = max(0.0, 1 - true / step) * math.exp(draw.gauss(0, self.noise))
        wait += abs(draw.gauss(0, WAIT_FLOOR)) if workers is not None else 0.0
        factor = math.exp(draw.gauss(0, self.noise))
        factor *= 1 + self._drift * math.sin(
            2 * math.pi * self.windows / self._drift_windows + self._phase
        )
        if draw.random() < self._outliers:
            loss = draw.uniform(*OUTLIER_LOSS)
            factor *= 1 - loss
            if draw.random() < 0.5:  # it was the loader that was held up
                wait += (1 - wait) * loss
        if self.windows >= self._neighbour_until and draw.random() < self._neighbours:
            self._neighbour_until = self.windows + draw.randint(*NEIGHBOUR_WINDOWS)
            self._neighbour_loss = draw.uniform(*NEIGHBOUR_LOSS)
        if self.windows < self._neighbour_until:
            factor *= 1 - self._neighbour_loss
        self.windows += 1
        return Reading(tokens_per_s=true * factor, data_wait_share=min(1.0, wait))
