"""Find the largest micro-batch in few trials: predict, correct the prediction by what trials show, prove both sides.

What is tried next is what leaves the fewest trials to follow, by what trials so far leave possible. Predictions only
choose what to try: the answer is always a trial that fitted next to one that was refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.decide.posterior import MIB, Answers, Float64, Prediction, Tried, posterior

GROWTH = 4
"""How fast sizes grow, without a prediction, until two of them show a slope."""
SLOPE_BYTES = 64 * MIB
"""Points that differ by less than three of the caching allocator's 20 MiB segments do not show a slope."""
LINE_SLOPE_SIGMA, LINE_CONSTANT_SIGMA = 0.05, 0.02
"""How far a line through two trials may be off: shares of its slope and of the peak."""
PATIENCE = 3
"""Trials after which the prediction begins to count for less."""
EVEN = 0.1
"""How much less, by each further trial."""
CANDIDATES = 48
"""Sizes that are compared, by their chance to fit."""
BOTH = 0.3
"""How much the smaller of two needs adds, that for bits and that for proof: most trials serve both."""
NORMAL_WIDTH = math.sqrt(2 * math.pi * math.e)
MAX_FAILURES = 3
"""A size that failed so often in ways that say nothing about memory is given up, and so is the search."""


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
    if not low:  # nothing has fitted yet: the prediction is further off than was thought
        refused = sum(trial.fits is False for trial in tried)
        known = replace(known, constant_sigma_bytes=known.constant_sigma_bytes * (1 + refused))
    # A fit at a size that was refused another time says nothing.
    believed = [trial for trial in tried if not trial.fits or high is None or trial.rows < high]
    answers = posterior(believed, known, budget_bytes).answers(known, budget_bytes, low, top)
    # The more trials did not end it, the more of the chance is shared out evenly between what fitted and what did not.
    even = min(1.0, EVEN * max(0, len(tried) - PATIENCE)) if high is not None else 0.0
    return _most_telling(answers, even)


def _most_telling(answers: Answers, even: float) -> int:
    """The size after whose trial the fewest are expected to follow.

    A refusal tells that larger sizes are not the answer. A fit tells the same of smaller ones, and its peak takes the
    constant error out of the prediction, so that what is left open is the slope's error on the way to the answer.
    """
    low, believed = answers.low, answers.chance
    chance = (1 - even) * believed + even / len(believed)
    or_more = np.cumsum(chance[::-1])[::-1]
    quantiles = np.searchsorted(-or_more, -np.linspace(0.995, 0.005, CANDIDATES), side="right") - 1
    likeliest = int(believed.argmax())
    best, fewest = 0, math.inf
    for number in np.unique([*quantiles, 1, likeliest, likeliest + 1]):
        if not 1 <= number < len(chance):
            continue
        fits = or_more[number]
        further = 0.0
        if fits > 0:
            away = np.arange(len(chance) - number)
            open_rows = np.hypot(answers.slope_sigma * away, answers.reading_sigma_rows)
            likely = _shares(believed[number:])
            # The entropy of a normal distribution with that standard deviation.
            left_bits = float(likely @ np.log2(np.maximum(1.0, NORMAL_WIDTH * open_rows)))
            told_bits = max(0.0, _bits(likely) - left_bits) * (1 - even) * believed[number:].sum() / fits
            further += fits * _trials(_shares(chance[number:]), told_bits)
        if fits < 1:
            further += (1 - fits) * _trials(_shares(chance[:number]), 0.0)
        if further < fewest:
            best, fewest = low + int(number), further
    return best


def _trials(chance: Float64, told_bits: float) -> float:
    """About how many trials follow: as many as halve what is open, and at least those that prove the answer."""
    open_bits = max(0.0, _bits(chance) - told_bits)
    proof = 2 - float(chance[0] + chance[-1])  # the ends of what is possible have been proven on their other side
    return max(open_bits, proof) + BOTH * min(open_bits, proof)


def _bits(chance: Float64) -> float:
    likely = chance[chance > 0]
    return -float(likely @ np.log2(likely))


def _shares(chance: Float64) -> Float64:
    shares: Float64 = chance / max(float(chance.sum()), 1e-300)
    return shares


def predict_bytes(tried: Sequence[Tried], rows: int, prediction: Prediction | None) -> int | None:
    """The peak of ``rows`` from smaller trials that fitted and what was known before them."""
    smaller = [trial for trial in tried if trial.rows < rows and trial.fits]
    known = prediction or _line(smaller)
    if known is None:
        return None
    return round(posterior(smaller, known, 2**62).expected_bytes(known.peak_bytes(rows)))


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
