"""What trials leave possible of the ways in which a prediction of memory may be off.

A prediction is off by a constant (what lies outside of what was traced) and by a share of what grows with the rows, and
an allocator rounds what is needed up to steps of its own. All pairs of such errors, for each of the steps that
allocators have, are weighed by how well they agree with the trials so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.decide.largest import largest_within

MIB = 2**20
STEPS_BYTES = (4096, 2 * MIB, 20 * MIB)
"""Pages of a CPU; the caching allocator's large requests, and its segments for smaller ones."""
PEAK_BYTES, PEAK_SHARE = MIB // 4, 0.0015
"""How far a peak that was read may be off, at most: three standard deviations."""
POINTS = 17
"""Sizes at which a prediction is asked for between the smallest answer that is possible and the largest."""

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A micro-batch and whether it fitted; ``peak_bytes`` is known where it did."""

    rows: int
    fits: bool | None
    """None: the trial failed in a way that says nothing about memory."""
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is known of the peak before any trial."""

    peak_bytes: Callable[[int], float]
    """By rows."""
    slope_sigma: float
    """Standard deviation of the error of what grows with rows, as a share of it."""
    constant_sigma_bytes: float
    """Standard deviation of the error of what does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How likely each size is to be the largest that fits."""

    low: int
    chance: Float64
    """Shape (sizes,), from ``low`` on."""
    slope_sigma: float
    """How uncertain the error of the slope still is, as a share of the slope."""
    reading_sigma_rows: float
    """How far a peak that is read may be off, in rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Ways in which a prediction may be off, each as likely as its weight says; shapes (E,)."""

    base_bytes: float
    constant_bytes: Float64
    slope: Float64
    step_bytes: Float64
    weight: Float64

    def expected_bytes(self, predicted_bytes: float) -> float:
        """What is needed instead of what was predicted."""
        line = predicted_bytes + self.constant_bytes + self.slope * (predicted_bytes - self.base_bytes)
        return float((np.ceil(line / self.step_bytes) * self.step_bytes * self.weight).sum())

    def answers(self, known: Prediction, budget_bytes: int, low: int, top: int) -> "Answers":
        """The largest size that fits under each of the errors, from ``low``, which is known to fit, to ``top``."""
        room = np.floor(budget_bytes / self.step_bytes) * self.step_bytes
        limit = (room - self.constant_bytes + self.slope * self.base_bytes) / np.maximum(1 + self.slope, 1e-9)
        first = largest_within(known.peak_bytes, float(limit.min()), low=low, top=top)
        last = largest_within(known.peak_bytes, float(limit.max()), low=first, top=top)
        points = np.unique(np.linspace(max(1, first), last + 1, POINTS).round())
        peaks = np.maximum.accumulate([known.peak_bytes(int(rows)) for rows in points])
        answer = np.clip(np.floor(np.interp(limit, peaks, points, left=first, right=last)), low, top)
        slope = float((self.weight * self.slope).sum())
        per_row = max(1.0, float(peaks[-1] - peaks[0]) / max(1.0, float(points[-1] - points[0])))
        step = float((self.weight * self.step_bytes**2).sum()) / 12
        read = ((PEAK_BYTES + PEAK_SHARE * budget_bytes) / 3) ** 2
        chance: Float64 = np.zeros(top - low + 1)
        np.add.at(chance, answer.astype(np.int64) - low, self.weight)
        return Answers(
            low=low,
            chance=chance,
            slope_sigma=float(np.sqrt((self.weight * (self.slope - slope) ** 2).sum())),
            reading_sigma_rows=float(np.sqrt(step + read)) / per_row,
        )


_SLOPES, _CONSTANTS, _SIGMAS = 161, 25, 4.0
"""The grid of errors, and how many standard deviations it reaches to either side."""
_ENOUGH_SLOPES = 40
"""Fewer that agree with all trials call for a finer grid."""


def posterior(tried: Sequence[Tried], known: Prediction, budget_bytes: int) -> Posterior:
    """All errors that agree with the trials; where none do, trials are read less exactly until some do."""
    doubt = 1.0
    while True:
        parts = [_errors_of_step(tried, known, budget_bytes, step, doubt) for step in STEPS_BYTES]
        found = [part for part in parts if part is not None]
        if found:
            weight = np.concatenate([part.weight for part in found])
            return Posterior(
                base_bytes=found[0].base_bytes,
                constant_bytes=np.concatenate([part.constant_bytes for part in found]),
                slope=np.concatenate([part.slope for part in found]),
                step_bytes=np.concatenate([part.step_bytes for part in found]),
                weight=weight / weight.sum(),
            )
        doubt *= 2


def _errors_of_step(
    tried: Sequence[Tried], known: Prediction, budget_bytes: int, step_bytes: int, doubt: float
) -> Posterior | None:
    """Those under which an allocator that works in such steps shows what the trials showed."""
    base = known.peak_bytes(1)
    sigma_bytes, sigma_slope = known.constant_sigma_bytes * doubt, known.slope_sigma * doubt
    slopes = np.linspace(-_SIGMAS * sigma_slope, _SIGMAS * sigma_slope, _SLOPES)
    for trial in tried:
        if trial.fits and trial.peak_bytes is not None:
            off = doubt * (PEAK_BYTES + PEAK_SHARE * trial.peak_bytes)
            beside = abs(trial.peak_bytes - round(trial.peak_bytes / step_bytes) * step_bytes)
            if beside > off:
                return None
    for _ in range(8):
        low = np.full(len(slopes), -_SIGMAS * sigma_bytes)
        high = np.full(len(slopes), _SIGMAS * sigma_bytes)
        for trial in tried:
            predicted = known.peak_bytes(trial.rows)
            line = predicted + slopes * (predicted - base)
            if trial.fits and trial.peak_bytes is not None:
                off = doubt * (PEAK_BYTES + PEAK_SHARE * trial.peak_bytes)
                low = np.maximum(low, trial.peak_bytes - step_bytes - off - line)
                high = np.minimum(high, trial.peak_bytes + off - line)
            if trial.fits is False:
                low = np.maximum(low, budget_bytes // step_bytes * step_bytes - line)
            elif trial.fits:
                high = np.minimum(high, budget_bytes // step_bytes * step_bytes - line)
        agree = np.flatnonzero(high >= low)
        if len(agree) == 0 or len(agree) >= _ENOUGH_SLOPES:
            break
        gap = slopes[1] - slopes[0]
        slopes = np.linspace(slopes[agree[0]] - gap, slopes[agree[-1]] + gap, _SLOPES)
    if len(agree) == 0:
        return None
    slopes, low, high = slopes[agree], low[agree], high[agree]
    share = (np.arange(_CONSTANTS) + 0.5) / _CONSTANTS
    constants = low[:, None] + (high - low)[:, None] * share
    gap = float(slopes[1] - slopes[0]) if len(slopes) > 1 else 1.0
    prior = np.exp(-0.5 * (constants / sigma_bytes) ** 2 - 0.5 * (slopes[:, None] / sigma_slope) ** 2)
    weight = prior * ((high - low)[:, None] / _CONSTANTS) * gap
    for trial in tried:
        if trial.fits and trial.peak_bytes is not None:
            predicted = known.peak_bytes(trial.rows)
            line = predicted + constants + slopes[:, None] * (predicted - base)
            off = trial.peak_bytes - np.ceil(line / step_bytes) * step_bytes
            weight *= np.exp(-0.5 * (off / (doubt * (PEAK_BYTES + PEAK_SHARE * trial.peak_bytes) / 3)) ** 2)
    return Posterior(
        base_bytes=base,
        constant_bytes=constants.ravel(),
        slope=np.repeat(slopes, _CONSTANTS),
        step_bytes=np.full(constants.size, float(step_bytes)),
        weight=np.maximum(weight.ravel(), 1e-300),
    )
