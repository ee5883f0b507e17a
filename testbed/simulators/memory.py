"""Simulated machines on which a largest micro-batch is searched.

The number of trials of a search is counted on them. They were settled before the search
that they judge: memory affine in the sequences and rounded up to the steps of an
allocator; a prediction that is off by a few per cent in slope and more in its constant;
peaks measured with a little noise; now and then a trial that fails in a way that says
nothing about memory. Whether a batch fits is never a matter of luck.
"""

import math
import random
from dataclasses import dataclass

from autotune.memory.decide.batch_search import (
    Prediction,
    SizeTrial,
    bracket,
    next_size,
)
from testbed.simulators.noise import log_uniform

MIB = 2**20
MACHINES = 300
MAX_MICRO_BATCH_SIZE = 16_384

FIXED_BYTES = (60 * MIB, 6_000 * MIB)
ROW_BYTES = (1 * MIB, 400 * MIB)
LARGEST_ROWS = (1, 1_500)
"""Log-uniform between these, as the two above."""
STEPS_BYTES = (4096, 512, 2 * MIB, 20 * MIB)
SLOPE_SIGMA = 0.02
CONSTANT_SIGMA = 0.10
PEAK_SIGMA = 0.0005
"""Relative standard deviations: of the prediction's slope and constant, and of the peak
that a trial reads."""
FAILURE_PROBABILITY = 0.03
"""Of a trial that crashes; tried again, it runs."""
ENDLESS_TRIALS = 100
"""So many count as wrong."""
CONSTANT_SIGMA = 0.1
"""Relative error of the prediction's constant that the search is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Outcome of a simulated trial."""

    fits: bool | None
    """None: it failed, and says nothing."""
    peak_bytes: int | None


class SimulatedMachine:
    """One machine with one model.

    Args:
        seed: Seed of everything that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._fixed = log_uniform(self._random, FIXED_BYTES)
        self._per_row = log_uniform(self._random, ROW_BYTES)
        self._step = self._random.choice(STEPS_BYTES)
        largest = round(log_uniform(self._random, LARGEST_ROWS))
        # Anywhere between what the largest needs and what one more would.
        self.budget_bytes = self._needed(largest) + int(
            self._random.random()
            * max(1, self._needed(largest + 1) - self._needed(largest))
        )
        self._predicted_row = self._per_row * (1 + self._random.gauss(0, SLOPE_SIGMA))
        self._predicted_fixed = self._fixed * (
            1 + self._random.gauss(0, CONSTANT_SIGMA)
        )
        self.attempts: list[tuple[int, Attempt]] = []

    @property
    def truth(self) -> int:
        """The largest number of rows that fits; 0 when none does."""
        low, high = 0, MAX_MICRO_BATCH_SIZE + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high)
                if self._needed(middle) <= self.budget_bytes
                else (low, middle)
            )
        return low

    def predicted_bytes(self, rows: int) -> float:
        """Return the prediction before any trial."""
        return self._predicted_fixed + self._predicted_row * rows

    def attempt(self, rows: int) -> Attempt:
        """Run a trial."""
        needed = self._needed(rows)
        if self._random.random() < FAILURE_PROBABILITY:
            result = Attempt(fits=None, peak_bytes=None)
        elif needed > self.budget_bytes:
            result = Attempt(fits=False, peak_bytes=None)
        else:
            result = Attempt(
                fits=True,
                peak_bytes=int(needed * (1 + self._random.gauss(0, PEAK_SIGMA))),
            )
        self.attempts.append((rows, result))
        return result

    def _needed(self, rows: int) -> int:
        return math.ceil((self._fixed + self._per_row * rows) / self._step) * self._step


def search(machine: SimulatedMachine, *, predicted: bool) -> tuple[int, bool]:
    """Return the trials of one search, and whether its answer was right.

    Trials that failed are counted.
    """
    prediction = Prediction(
        peak_bytes=machine.predicted_bytes,
        unsure_bytes=CONSTANT_SIGMA * machine.predicted_bytes(0),
    )
    tried: list[SizeTrial] = []
    while len(tried) < ENDLESS_TRIALS:
        rows = next_size(
            tried,
            machine.budget_bytes,
            MAX_MICRO_BATCH_SIZE,
            prediction if predicted else None,
        )
        if rows is None:
            return len(tried), bracket(tried).feasible_max == machine.truth
        attempt = machine.attempt(rows)
        tried.append(
            SizeTrial(
                micro_batch_size=rows, fits=attempt.fits, peak_bytes=attempt.peak_bytes
            )
        )
    return len(tried), False
