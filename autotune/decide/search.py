"""Find the largest micro-batch in few trials: predict, correct the prediction by what trials show, prove both sides.

A prediction is off by a constant (what lies outside of what was traced) and by a share of what grows with the rows, and
an allocator rounds what is needed up to steps of its own. All pairs of such errors, for each of the steps that
allocators have, that agree with the trials so far say how likely each size is to fit; what is tried next halves what is
left of the likelihood. Predictions only choose what to try: the answer is always a trial that fitted next to one that
was refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

MIB = 2**20
GROWTH = 4
"""How fast sizes grow, without a prediction, until two of them show a slope."""
SLOPE_BYTES = 64 * MIB
"""Points that differ by less than three of the caching allocator's 20 MiB segments do not show a slope."""
FIRST_CHANCE, FURTHER_CHANCE = 0.85, 0.5
"""Chance to fit of what is tried: a fit also reads a peak, which is worth most at first; a refusal only says no."""
STEPS_BYTES = (4096, 2 * MIB, 20 * MIB)
"""Pages of a CPU; the caching allocator's large requests, and its segments for smaller ones."""
PEAK_BYTES, PEAK_SHARE = MIB // 4, 0.0015
"""How far a peak that was read may be off, at most: three standard deviations."""
LINE_SLOPE_SIGMA, LINE_CONSTANT_SIGMA = 0.05, 0.02
"""How far a line through two trials may be off: shares of its slope and of the peak."""
PATIENCE = 3
"""Trials after which the prediction begins to count for less."""
MAX_FAILURES = 3
"""A size that failed so often in ways that say nothing about memory is given up, and so is the search."""

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
class Bracket:
    """What trials have shown: ``feasible_max`` fits (0: nothing yet), ``infeasible_min`` does not (None: none yet)."""

    feasible_max: int
    infeasible_min: int | None

    @property
    def closed(self) -> bool:
        """Whether the two touch."""
        return self.infeasible_min == self.feasible_max + 1


def bracket(tried: Sequence[Tried]) -> Bracket:
    """Summarise trials. A refusal counts against every size from its own up, whatever fitted there by luck."""
    refused = [trial.rows for trial in tried if trial.fits is False]
    infeasible_min = min(refused, default=None)
    fitted = [trial.rows for trial in tried if trial.fits and (infeasible_min is None or trial.rows < infeasible_min)]
    return Bracket(feasible_max=max(fitted, default=0), infeasible_min=infeasible_min)


def next_rows(
    tried: Sequence[Tried], budget_bytes: int, max_rows: int, prediction: Prediction | None = None
) -> int | None:
    """What to try next.

    Args:
        tried: Trials so far, in their order.
        budget_bytes: The budget that ``peak_bytes`` counts against.
        max_rows: Nothing above is tried.
        prediction: What is known beforehand; without it two trials make one.

    Returns:
        A number of rows, or None when the largest is proven, or nothing fits, or ``max_rows`` fits.
    """
    if tried and tried[-1].fits is None:
        return tried[-1].rows
    state = bracket(tried)
    low, high = state.feasible_max, state.infeasible_min
    if state.closed or high == 1 or low >= max_rows:
        return None
    known = prediction or _line(tried)
    top = max_rows if high is None else high - 1
    if known is None:
        if low == 0:
            return 1 if high is None else max(1, high // 2)
        return min(GROWTH * low, top) if high is None else (low + high) // 2
    refused, fitted = _running(tried, fits=False), _running(tried, fits=True)
    if not low:  # nothing has fitted yet: the prediction is further off than was thought
        known = replace(known, constant_sigma_bytes=known.constant_sigma_bytes * (1 + refused))
    errors = _errors(tried, known, budget_bytes)
    # The same outcome several times running calls for a longer step in that direction.
    wanted = 1 - (1 - (FURTHER_CHANCE if low else FIRST_CHANCE)) / (1 + max(0, refused - 1)) ** 2
    wanted /= 1 + max(0, fitted - 2)
    # The more trials did not end it, the more of the chance is shared out evenly between what fitted and what did not.
    even = min(0.5, 0.1 * max(0, len(tried) - PATIENCE)) if high is not None else 0.0
    least, last = low + 1, top
    while last > least:  # the largest size that is as likely to fit as is wanted
        middle = (least + last + 1) // 2
        chance = errors.chance(known.peak_bytes(middle), budget_bytes)
        if (1 - even) * chance + even * (top + 1 - middle) / (top + 1 - low) >= wanted:
            least = middle
        else:
            last = middle - 1
    return least


def _running(tried: Sequence[Tried], *, fits: bool) -> int:
    """How many of the last trials that said anything had this outcome."""
    told = [trial.fits for trial in tried if trial.fits is not None]
    return next((number for number, one in enumerate(reversed(told)) if one is not fits), len(told))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Errors:
    """Ways in which a prediction may be off, each as likely as its weight says; shapes (E,)."""

    base_bytes: float
    constant_bytes: Float64
    slope: Float64
    step_bytes: Float64
    weight: Float64

    def chance(self, predicted_bytes: float, budget_bytes: int) -> float:
        """How likely it is that what was predicted so fits."""
        fits = self._needed(predicted_bytes) <= budget_bytes
        return float(self.weight[fits].sum())

    def expected_bytes(self, predicted_bytes: float) -> float:
        """What is needed instead of what was predicted."""
        return float((self._needed(predicted_bytes) * self.weight).sum())

    def _needed(self, predicted_bytes: float) -> Float64:
        line = predicted_bytes + self.constant_bytes + self.slope * (predicted_bytes - self.base_bytes)
        needed: Float64 = np.ceil(line / self.step_bytes) * self.step_bytes
        return needed


_SLOPES, _CONSTANTS, _SIGMAS = 161, 25, 4.0
"""The grid of errors, and how many standard deviations it reaches to either side."""
_ENOUGH_SLOPES = 40
"""Fewer that agree with all trials call for a finer grid."""


def _errors(tried: Sequence[Tried], known: Prediction, budget_bytes: int) -> _Errors:
    """All errors that agree with the trials; where none do, trials are read less exactly until some do."""
    doubt = 1.0
    while True:
        parts = [_errors_of_step(tried, known, budget_bytes, step, doubt) for step in STEPS_BYTES]
        found = [part for part in parts if part is not None]
        if found:
            weight = np.concatenate([part.weight for part in found])
            return _Errors(
                base_bytes=found[0].base_bytes,
                constant_bytes=np.concatenate([part.constant_bytes for part in found]),
                slope=np.concatenate([part.slope for part in found]),
                step_bytes=np.concatenate([part.step_bytes for part in found]),
                weight=weight / weight.sum(),
            )
        doubt *= 2


def _errors_of_step(
    tried: Sequence[Tried], known: Prediction, budget_bytes: int, step_bytes: int, doubt: float
) -> _Errors | None:
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
    return _Errors(
        base_bytes=base,
        constant_bytes=constants.ravel(),
        slope=np.repeat(slopes, _CONSTANTS),
        step_bytes=np.full(constants.size, float(step_bytes)),
        weight=np.maximum(weight.ravel(), 1e-300),
    )


def predict_bytes(tried: Sequence[Tried], rows: int, prediction: Prediction | None) -> int | None:
    """The peak of ``rows`` from smaller trials that fitted and what was known before them."""
    smaller = [trial for trial in tried if trial.rows < rows and trial.fits]
    known = prediction or _line(smaller)
    if known is None:
        return None
    return round(_errors(smaller, known, 2**62).expected_bytes(known.peak_bytes(rows)))


def _line(tried: Sequence[Tried]) -> Prediction | None:
    """A straight line through two trials that fitted; None where they show no slope."""
    peaks = {trial.rows: trial.peak_bytes for trial in tried if trial.fits and trial.peak_bytes is not None}
    points = sorted(peaks.items())
    if len(points) < 2:
        return None
    rows_2, bytes_2 = points[-1]
    # Allocator steps drown the slope between near neighbours, curvature bends that between far ones.
    apart = (point for point in reversed(points[:-1]) if bytes_2 - point[1] >= SLOPE_BYTES)
    rows_1, bytes_1 = next(apart, points[0])
    slope = (bytes_2 - bytes_1) / (rows_2 - rows_1)
    if slope <= 0 or (bytes_2 - bytes_1 < SLOPE_BYTES and bracket(tried).infeasible_min is None):
        return None
    return Prediction(
        peak_bytes=lambda rows: bytes_2 + slope * (rows - rows_2),
        slope_sigma=LINE_SLOPE_SIGMA,
        constant_sigma_bytes=LINE_CONSTANT_SIGMA * bytes_2,
    )
